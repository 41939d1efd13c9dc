"""One place for each dangerous thing, and none for some: rules over every module of the package.

A rule takes a module and returns its violations. `RULES` pairs each with the modules it exempts; `PLANTED` shows each
failing, and `CLEAN` shows what it must let pass.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterator

import pytest

from .source import AnyFunction, Module, package_modules, plant

Rule = Callable[[Module], list[str]]

COLLECTIVES = frozenset(
    """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list gather
    gather_object irecv isend monitored_barrier recv recv_object_list reduce reduce_scatter reduce_scatter_single
    reduce_scatter_tensor scatter scatter_object_list send send_object_list P2POp _functional_collectives
    """.split()
)
# Methods of a process group, under names that nothing else has.
RAW_COLLECTIVES = frozenset(
    """
    allgather allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base
    reduce_scatter_tensor_coalesced _allgather_base _reduce_scatter_base
    """.split()
)
UNSAFE_MODULES = frozenset(["pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"])
UNSAFE_NAMES = frozenset(
    """
    torch.load torch.save torch.serialization.load torch.hub.load numpy.load yaml.load yaml.unsafe_load eval exec
    builtins.eval builtins.exec compile builtins.compile
    torch.distributed.all_gather_object torch.distributed.broadcast_object_list torch.distributed.gather_object
    torch.distributed.scatter_object_list torch.distributed.send_object_list torch.distributed.recv_object_list
    """.split()
)
# Of tensors, storages, nodes and DTensors.
PRIVATE_ATTRIBUTES = frozenset(
    "_version _cdata _execution_engine next_functions _local_tensor _spec _foreach_supported_types".split()
)
STREAMS = frozenset(
    """
    torch.Stream torch.Event torch.cuda.Stream torch.cuda.Event torch.cuda.ExternalStream torch.cuda.stream
    torch.cuda.StreamContext torch.cuda.current_stream torch.cuda.default_stream torch.cuda.set_stream
    torch.accelerator.current_stream torch.accelerator.set_stream
    """.split()
)
FACTORIES = frozenset(
    f"torch.{name}"
    for name in """
    arange as_tensor asarray empty empty_strided eye full linspace logspace ones rand randint randn randperm
    scalar_tensor tensor zeros
    """.split()
)
MESH_WORDS = frozenset("axis data dp mesh model pipe pp rank ranks replicate shard tensor tp world".split())
# Calls that make something which cannot change, or whose state is torch's or typing's business.
IMMUTABLE_CALLS = frozenset(
    """
    frozenset tuple int float str bytes types.MappingProxyType typing.TypeVar typing.ParamSpec typing.NewType
    typing.TypeVarTuple re.compile struct.Struct logging.getLogger pathlib.Path torch.Size torch.device
    importlib.metadata.version object operator.attrgetter contextlib.nullcontext
    """.split()
)
MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def collectives(module: Module) -> list[str]:
    """Collectives are called in transports of `wire/` only, which count bytes and pick the algorithm."""
    found = []
    for line, name in module.references:
        base, _, last = name.rpartition(".")
        if last in COLLECTIVES and (base == "torch.distributed" or base.startswith("torch.distributed.")):
            found.append(module.at(line, f"{name}: collectives belong in a transport of wire/"))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in RAW_COLLECTIVES:
            found.append(module.at(node.lineno, f".{node.attr}: collectives belong in a transport of wire/"))
    return found


def torch_private(module: Module) -> list[str]:
    """What torch calls private may change without a word: one module has these names, and tests what they do."""
    found = [
        module.at(line, f"{name}: private names of torch belong in torch_private.py")
        for line, name in module.references
        if name.startswith("torch.") and any(part[0] == "_" != part[1:2] for part in name.split("."))
    ]
    return found + [
        module.at(node.lineno, f".{node.attr}: private names of torch belong in torch_private.py")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES
    ]


def environment(module: Module) -> list[str]:
    """Environment variables are read where the ranks begin, so that no setting acts from afar."""
    names = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    return [module.at(line, f"{name}: read the environment in wire/mesh.py") for line, name in exact(module, names)]


def printing(module: Module) -> list[str]:
    """A library does not write to the terminal."""
    names = ("print", "builtins.print", "sys.stdout", "sys.stderr", "rich.print", "rich.console.Console", "typer.echo")
    return [module.at(line, f"{name}: print in cli.py") for line, name in exact(module, names)]


def stage_numbers(module: Module) -> list[str]:
    """A stage is a row of the table; who asks for its number repeats the table."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            is_asked = any(is_stage(side) for side in sides) and any(holds_integer(side) for side in sides)
        elif isinstance(node, ast.Subscript):
            is_asked = is_stage(node.slice)
        elif isinstance(node, ast.Match):
            is_asked = is_stage(node.subject)
        else:
            continue
        if is_asked:
            found.append(module.at(node.lineno, "asks for a stage by its number: read the row (table/stages.py)"))
    return found


def is_stage(node: ast.expr) -> bool:
    """Tell whether an expression is called `stage`, or `something_stage`, or is `int()` of such a one."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return is_stage(node.args[0])
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return "stage" in words(name)


def holds_integer(node: ast.expr) -> bool:
    """Tell whether an expression is an integer, or a display or `range` of integers."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(holds_integer(element) for element in node.elts)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "range"
    if isinstance(node, ast.UnaryOp):
        return holds_integer(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool)


def module_state(module: Module) -> list[str]:
    """Two models in one process must not meet in a module's variables, and an import must not do work."""
    found = []
    for statement in top_level(module.tree.body):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if statement.value is not None and [ast.unparse(target) for target in targets] != ["__all__"]:
                found += [module.at(statement.lineno, why) for why in mutable_parts(module, statement.value)]
        elif isinstance(statement, ast.Expr):
            if not isinstance(statement.value, ast.Constant):
                found.append(module.at(statement.lineno, "does work at import"))
        elif isinstance(statement, ast.AugAssign | ast.For | ast.While | ast.With | ast.Delete):
            found.append(module.at(statement.lineno, "does work at import"))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            found.append(module.at(node.lineno, f"global {', '.join(node.names)}: module-level state"))
        elif isinstance(node, ast.ClassDef):
            found += class_state(module, node)
    return found


def class_state(module: Module, node: ast.ClassDef) -> list[str]:
    """List the mutable literals that all objects of a class would share."""
    found = []
    for statement in node.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, MUTABLE_LITERALS):
            found.append(module.at(statement.lineno, f"class {node.name} shares a mutable value among its objects"))
    return found


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run at import, those under `if` and `try` included, `if __name__ == ...` not."""
    for statement in body:
        if isinstance(statement, ast.If):
            if "__name__" not in ast.unparse(statement.test):
                yield from top_level([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handlers = [inner for handler in statement.handlers for inner in handler.body]
            yield from top_level([*statement.body, *handlers, *statement.orelse, *statement.finalbody])
        else:
            yield statement


def mutable_parts(module: Module, value: ast.expr) -> list[str]:
    """Say what in a module-level value can change, or cannot be told not to."""
    if isinstance(value, MUTABLE_LITERALS):
        return [f"module-level {type(value).__name__}: use a tuple, frozenset or MappingProxyType"]
    if isinstance(value, ast.Tuple):
        return [why for element in value.elts for why in mutable_parts(module, element)]
    if isinstance(value, ast.Starred):
        return mutable_parts(module, value.value)
    if isinstance(value, ast.Call):
        return mutable_call(module, value)
    return []


def mutable_call(module: Module, call: ast.Call) -> list[str]:
    """Say why a module-level call may make something mutable; nothing for known immutable types."""
    name = module.full_name(call.func)
    if name in IMMUTABLE_CALLS:
        if name != "types.MappingProxyType":
            return []
        # The dictionary inside is reachable only through the proxy; its values are on their own.
        values = call.args[0].values if call.args and isinstance(call.args[0], ast.Dict) else []
        return [why for value in values for why in mutable_parts(module, value)]
    if name.rpartition(".")[2] in frozen_classes():
        return []
    return [f"module-level call of {name or 'an expression'}: is what it returns immutable?"]


@functools.cache
def frozen_classes() -> frozenset[str]:
    """Name the package's frozen dataclasses."""
    names = set()
    for module in package_modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and any(
                re.fullmatch(r"(dataclasses\.)?dataclass\(.*frozen=True.*\)", ast.unparse(decorator))
                for decorator in node.decorator_list
            ):
                names.add(node.name)
    return frozenset(names)


def unsafe_formats(module: Module) -> list[str]:
    """Nothing the package reads may run code."""
    found = [
        module.at(line, f"{name}: what it reads or runs may be anybody's code")
        for line, name in exact(module, UNSAFE_NAMES)
    ]
    for line, name in imported(module):
        if name.partition(".")[0] in UNSAFE_MODULES:
            found.append(module.at(line, f"{name}: what it reads may be anybody's code"))
    return found


def guarded_pickles(module: Module) -> list[str]:
    """Where pickles are opened, names are looked up by a class of the package's own, or torch loads weights only."""
    found = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        name = module.full_name(node.func)
        is_guarded = any(word.arg == "weights_only" and is_true(word.value) for word in node.keywords)
        if name.startswith("pickle.") or (name == "torch.load" and not is_guarded):
            found.append(module.at(node.lineno, f"{name}: what it reads may be anybody's code"))
    return found


def is_true(node: ast.expr) -> bool:
    """Tell whether an expression is the word True."""
    return isinstance(node, ast.Constant) and node.value is True


def vocabulary(module: Module) -> list[str]:
    """One word for one thing: the names that the package gives follow docs/design.md."""
    # P_a is the one thing of that name.
    found = [(line, name) for line, name in defined_names(module.tree) if name != "Partition"]
    return [module.at(line, f"{name}: {why}") for line, name in found for why in wrong_words(name)]


def wrong_words(name: str) -> list[str]:
    """Say which words of a name the project does not use."""
    parts = words(name)
    found = []
    if parts & {"partition", "partitions", "partitioning"}:
        found.append("say shard, not partition")
    if parts & {"fetch", "fetches", "fetched"}:
        found.append("say gather, not fetch")
    if parts & {"hp", "lp"}:
        found.append("say master weights or compute dtype, not hp or lp")
    if {"flat", "param"} <= parts or {"flat", "parameter"} <= parts:
        found.append("say bucket, not flat_param")
    if parts & {"group", "groups"} and parts & MESH_WORDS:
        found.append("say mesh or axis, not group")
    return found


def words(name: str) -> frozenset[str]:
    """Split a name in snake_case or CamelCase into lower-case words."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return frozenset(part for part in spaced.lower().split("_") if part)


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything a module names itself; what torch named is torch's business."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | AnyFunction):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def exact(module: Module, names: tuple[str, ...] | frozenset[str]) -> list[tuple[int, str]]:
    """List line and name of every reference to one of `names`, or to something inside it."""
    return [
        (line, name) for line, name in module.references if any(name == n or name.startswith(n + ".") for n in names)
    ]


def imported(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of every imported module."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, item.name) for item in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, node.module or ""


# Programs of their own; tests of torch run apart from the modes of the caller.
MAKE_FREELY = ("plan", "report", "testing", "torch_checks", "torch_private", "train")


def default_devices(module: Module) -> list[str]:
    """A tensor that the package makes for itself has a device: torch.set_default_device may be "meta"."""
    if module.name.partition(".")[2].partition(".")[0] in MAKE_FREELY:
        return []
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    made = [(node, module.full_name(node.func)) for node in calls]
    return [
        module.at(node.lineno, f"{name} without device=")
        for node, name in made
        if name in FACTORIES and not any(word.arg in ("device", None) for word in node.keywords)
    ]


# The test helper starts processes: it gives them their environment, and waits once until all have joined.
RULES: dict[Rule, frozenset[str]] = {
    collectives: frozenset(
        [
            "zeroshard.wire.comm",
            "zeroshard.wire.gloo",
            "zeroshard.wire.linked",
            "zeroshard.wire.nccl",
            "zeroshard.testing",
        ]
    ),
    torch_private: frozenset(["zeroshard.torch_groups", "zeroshard.torch_private"]),
    environment: frozenset(["zeroshard.wire.mesh", "zeroshard.train.launch", "zeroshard.testing"]),
    printing: frozenset(["zeroshard.cli", "zeroshard.terminal"]),
    stage_numbers: frozenset(["zeroshard.table.stages"]),
    module_state: frozenset(),
    default_devices: frozenset(),
    unsafe_formats: frozenset(["zeroshard.checkpoint.pickled"]),
    guarded_pickles: frozenset(),
    vocabulary: frozenset(),
}

PLANTED: list[tuple[Rule, str]] = [
    (default_devices, "import torch\ndef f():\n    return torch.zeros(2)"),
    (torch_private, "import torch\nnumber = torch._C._current_graph_task_id"),
    (torch_private, "from torch.optim.optimizer import _use_grad_for_differentiable"),
    (torch_private, "def f(tensor):\n    return tensor._version"),
    (collectives, "import torch.distributed as dist\ndef f(x):\n    dist.all_reduce(x)"),
    (collectives, "import torch\ndef f(x):\n    torch.distributed.broadcast(x, 0)"),
    (collectives, "from torch.distributed import isend as send_later"),
    (collectives, "from torch import distributed\ndef f(x):\n    return distributed.irecv"),
    (collectives, "from torch.distributed.distributed_c10d import reduce_scatter_tensor"),
    (collectives, "import torch.distributed._functional_collectives as funcol\nx = funcol"),
    (collectives, "def f(process_group, x):\n    process_group.allreduce([x]).wait()"),
    (environment, "import os\ndef f():\n    return os.environ['RANK']"),
    (environment, "from os import environ"),
    (environment, "import os as system\ndef f():\n    return system.getenv('RANK')"),
    (printing, "def f():\n    print('here')"),
    (printing, "import sys\ndef f():\n    sys.stdout.write('here')"),
    (printing, "from rich.console import Console"),
    (stage_numbers, "def f(stage):\n    return stage == 3"),
    (stage_numbers, "def f(self):\n    return 2 <= self.zero_stage"),
    (stage_numbers, "def f(stage):\n    return stage in (1, 2)"),
    (stage_numbers, "def f(config):\n    return int(config.stage) > -1"),
    (stage_numbers, "def f(stage):\n    return stage not in range(4)"),
    (stage_numbers, "def f(stage, table):\n    return table[stage]"),
    (stage_numbers, "def f(stage):\n    match stage:\n        case 2:\n            return 1"),
    (module_state, "CACHE = {}"),
    (module_state, "LIMITS: list[int] = [1, 2]"),
    (module_state, "PAIRS = ((1, 2), [3])"),
    (module_state, "from types import MappingProxyType\nTABLE = MappingProxyType({0: []})"),
    (module_state, "import collections\nSEEN = collections.Counter()"),
    (module_state, "if True:\n    NAMES = {name for name in 'ab'}"),
    (module_state, "try:\n    import torch\nexcept ImportError:\n    KNOWN = []"),
    (module_state, "def f():\n    global count\n    count = 1"),
    (module_state, "import torch\ntorch.set_num_threads(1)"),
    (module_state, "for x in range(3):\n    pass"),
    (module_state, "class A:\n    shared = []"),
    (unsafe_formats, "import pickle"),
    (unsafe_formats, "def f():\n    from cloudpickle import loads"),
    (unsafe_formats, "import torch\ndef f(path):\n    return torch.load(path, weights_only=True)"),
    (unsafe_formats, "from torch import load"),
    (unsafe_formats, "import numpy as np\ndef f(path):\n    return np.load(path)"),
    (unsafe_formats, "def f(text):\n    return eval(text)"),
    (unsafe_formats, "def f(text):\n    exec(text)"),
    (unsafe_formats, "import torch.distributed as dist\ndef f(x):\n    dist.broadcast_object_list(x)"),
    (guarded_pickles, "import pickle\ndef f(data):\n    return pickle.loads(data)"),
    (guarded_pickles, "import pickle\ndef f(file):\n    return pickle.Unpickler(file).load()"),
    (guarded_pickles, "import torch\ndef f(path):\n    return torch.load(path)"),
    (guarded_pickles, "import torch\ndef f(path):\n    return torch.load(path, weights_only=False)"),
    (vocabulary, "def partition_gradients(x): ..."),
    (vocabulary, "class FlatParam: ..."),
    (vocabulary, "def f(fetch_ahead): ..."),
    (vocabulary, "def f(x):\n    lp_grad = x"),
    (vocabulary, "class A:\n    def __init__(self, x):\n        self.flat_param = x"),
    (vocabulary, "def f(mesh):\n    shard_group = mesh"),
]

CLEAN: list[tuple[Rule, str]] = [
    (guarded_pickles, "import torch\ndef f(path):\n    return torch.load(path, weights_only=True)"),
    (guarded_pickles, "import pickle\nclass A(pickle.Unpickler): ..."),
    (default_devices, "import torch\ndef f(x):\n    return torch.zeros(2, device='cpu') + torch.ones_like(x)"),
    (torch_private, "import torch\ndef f(x):\n    return torch.Tensor.__add__(x, x._versions)"),
    (collectives, "from zeroshard.wire import comm\ndef f(x, unit):\n    comm.gather(x)\n    unit.reduce(x)"),
    (collectives, "import torch.distributed as dist\ndef f():\n    return dist.get_rank()"),
    (collectives, "import torch\ndef f(x, i):\n    return x.gather(0, i) + torch.scatter(x, 0, i, x)"),
    (environment, "import os\ndef f():\n    return os.path.join('a', 'b')"),
    (printing, "def f(report):\n    report.print_line('x')"),
    (stage_numbers, "def f(stage: int = 3):\n    return stage is None or shard(stage=2) or STAGES == stage"),
    (stage_numbers, "def f(staged, x):\n    return staged[x] == 1"),
    (module_state, "from typing import TypeVar\n__all__ = ['f']\nT = TypeVar('T')\nNAMES = ('a', frozenset(['b']))"),
    (module_state, "from types import MappingProxyType\nTABLE = MappingProxyType({0: (1, 2)})\nLIMIT = 2**20"),
    (module_state, "def f():\n    seen = {}\n    return seen\nif __name__ == '__main__':\n    f()"),
    (module_state, "import dataclasses\nclass A:\n    x: list = dataclasses.field(default_factory=list)\n    y = ()"),
    (unsafe_formats, "import torch\ndef f(model):\n    model.eval()\n    return torch.compile(model)"),
    (
        vocabulary,
        "def f(optimizer):\n    for group in optimizer.param_groups:\n        head, _, tail = 'a.b'.partition('.')",
    ),
    (vocabulary, "def prefetch(process_group): ...\nclass Partitioned: ..."),
]


def rule_id(value: object) -> str:
    """Name a parameter of a test: a rule by its function, a text by its last line."""
    return value.__name__ if callable(value) else str(value).splitlines()[-1].strip()[:40]


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    modules = [module for module in package_modules() if module.name not in RULES[rule]]
    assert len(modules) > len(package_modules()) // 2
    assert [violation for module in modules for violation in rule(module)] == []


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_exempt_modules_exist_and_need_it(rule: Rule) -> None:
    exempt = {module.name: module for module in package_modules() if module.name in RULES[rule]}
    assert {name for name in RULES[rule] if not (name in exempt and rule(exempt[name]))} == set()


@pytest.mark.parametrize(("rule", "text"), PLANTED, ids=rule_id)
def test_a_planted_violation_is_found(rule: Rule, text: str) -> None:
    assert rule(plant("zeroshard.planted", text)) != []


@pytest.mark.parametrize(("rule", "text"), CLEAN, ids=rule_id)
def test_what_is_allowed_passes(rule: Rule, text: str) -> None:
    assert rule(plant("zeroshard.planted", text)) == []


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _ in PLANTED} == set(RULES) == {rule for rule, _ in CLEAN}


def users_of_streams(modules: tuple[Module, ...]) -> list[str]:
    """Name the modules that handle streams or events."""
    return sorted({module.name for module in modules if exact(module, STREAMS)})


def test_streams_and_events_stay_in_one_file() -> None:
    assert len(users_of_streams(package_modules())) <= 1


def test_streams_in_two_files_are_found() -> None:
    one = plant("zeroshard.wire.comm", "import torch\ndef f():\n    return torch.cuda.Stream()")
    two = plant("zeroshard.core.unit", "from torch.cuda import current_stream")
    none = plant("zeroshard.core.order", "from zeroshard.table.trace import Event")
    assert users_of_streams((one, two, none)) == ["zeroshard.core.unit", "zeroshard.wire.comm"]
