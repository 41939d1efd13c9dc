// Two CUDA devices in memory of the host, for a build of torch without CUDA: tensors say that they are on "cuda:0" or
// "cuda:1", operations between devices fail as they do on a GPU, autograd starts a thread for each device, and the bytes
// that each device holds are counted. Kernels are those of the CPU, so all that a stream was told is done at once; which
// stream is the current one is kept as on a GPU, and autograd runs each node on the stream of its forward. See cuda.py.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>

namespace {

constexpr int COUNT = 2;
std::atomic<int64_t> held[COUNT], peak[COUNT];
thread_local int current = 0;
thread_local int64_t streams[COUNT];

struct Block {
  void* memory;
  size_t nbytes;
  int device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  held[block->device] -= static_cast<int64_t>(block->nbytes);
  std::free(block->memory);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto* block = new Block{std::aligned_alloc(64, (nbytes + 63) / 64 * 64 + 64), nbytes, current};
    int64_t now = held[current] += static_cast<int64_t>(nbytes);
    if (now > peak[current]) peak[current] = now;
    return {block->memory, block, &release, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(current))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(current)}; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() < COUNT, "CUDA error: invalid device ordinal (emulated)");
    if (to.index() >= 0) current = to.index();
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.index() >= 0) current = to.index();
  }
  c10::Stream getStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::UNSAFE, of, streams[of.index()]);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    streams[to.device_index()] = to.id();
    return before;
  }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = &held; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  int getNumGPUs() const override { return COUNT; }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(current); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current); }
  void setCurrentDevice(c10::DeviceIndex to) const override { current = to; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    auto before = getCurrentDevice();
    if (to >= 0) current = to;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return exchangeDevice(to); }
};

c10::Device device_of(std::optional<c10::Device> asked) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(asked && asked->has_index() ? asked->index() : current)};
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// The same memory, as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  at::Tensor made = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  return made;
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool) {
  if (self.numel()) on_host(self).copy_(on_host(source));
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  if (target.numel()) on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor& self) { return on_host(self).item(); }

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      self, storage, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride));
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

struct Begin {
  Begin() { c10::SetAllocator(c10::kCUDA, &memory, 1); }
} begin;

}  // namespace

namespace at {
using CUDAHooks = Hooks;  // the name by which torch asks
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

extern "C" {
int64_t emulated_stream(int device) { return streams[device]; }
void emulated_use_stream(int device, int64_t stream) { streams[device] = stream; }
int emulated_device() { return current; }
void emulated_use_device(int device) { current = device; }
int64_t emulated_held(int device) { return held[device]; }
int64_t emulated_peak(int device) { return peak[device]; }
void emulated_reset(int device) { peak[device] = held[device].load(); }
int emulated_resize(void* storage_impl, int64_t nbytes) {
  auto* storage = static_cast<c10::StorageImpl*>(storage_impl);
  c10::DeviceGuard guard(storage->device());
  at::DataPtr fresh = memory.allocate(static_cast<size_t>(nbytes));
  std::memcpy(fresh.get(), storage->data(), std::min(static_cast<size_t>(nbytes), storage->nbytes()));
  storage->set_data_ptr(std::move(fresh));
  storage->set_nbytes(static_cast<size_t>(nbytes));
  return 0;
}
}
