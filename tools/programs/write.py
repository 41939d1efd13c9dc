"""A program as data, turned into Python: what runs, and what is printed of a failure.

Owns the text. A program is a mapping that JSON can hold; `draw.py` says what is in it. The text is an ordinary training
script but for the calls on `job` (`job.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["code_of", "compiled", "inside", "path_of", "script_of"]

Spec = Mapping[str, Any]

HEAD = """\
import torch
from torch import nn
from tools.programs.blocks import *
"""


def code_of(spec: Spec) -> str:
    """Return the functions `build()` and `program(job)`."""
    return "\n".join([HEAD, *_build(spec), "", "", *_program(spec), ""])


def script_of(spec: Spec) -> str:
    """Return a script that runs the program on ranks and compares it with the oracle."""
    plain = {key: value for key, value in spec.items() if key not in ("blocks", "ops")}
    return "\n".join(
        [
            f'"""{spec["world"]} ranks: {plain}"""',
            code_of(spec),
            "",
            'if __name__ == "__main__":',
            "    from tools.programs.ranks import show",
            "",
            f"    show({dict(spec)!r})",
            "",
        ]
    )


def compiled(spec: Spec) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `build` and `program`."""
    names: dict[str, Any] = {}
    exec(compile(code_of(spec), f"program-{spec['seed']}", "exec"), names)  # noqa: S102
    return names["build"], names["program"]


def _build(spec: Spec) -> list[str]:
    width = spec["width"]
    lines = ["def build():", f"    torch.manual_seed({spec['seed']})"]
    blocks = ", ".join(f"{kind}({width})" for kind in spec["blocks"])
    lines.append(f"    blocks = [{blocks}]")
    lines += [f"    blocks[{to}] = blocks[{of}]" for to, of in spec["shared"]]
    lines += [f"    blocks[{to}].linear.weight = blocks[{of}].linear.weight" for to, of in spec["ties"]]
    flags = f"takes_ids={spec['takes_ids']}, is_tied={spec['is_tied']}"
    lines.append(f"    net = Net({width}, blocks, {spec['container']!r}, {flags})")
    lines += [f"    {_module(spec, name)}.requires_grad_(False)" for name in spec["frozen"]]
    owners = [[path_of(spec, name) for name in one["parts"]] for one in spec["optimizers"]]
    ignored = [path_of(spec, name) for name in spec["options"].get("ignored", ())]
    lines.append(f"    parts = split_parameters(net, {owners!r}{f', {ignored!r}' if ignored else ''})")
    made = []
    for at, one in enumerate(spec["optimizers"]):
        given = f"groups_of(parts[{at}], {one['options']['lr']})" if one["groups"] else f"parts[{at}]"
        options = ", ".join(f"{name}={value!r}" for name, value in one["options"].items())
        made.append(f"torch.optim.{one['kind']}({given}, {options})")
    return [*lines, f"    return net, [{', '.join(made)}]"]


def path_of(spec: Spec, name: str) -> str:
    """Return where a part is in the module tree: "stem", "head", the number of a block, "2:inner.0" inside block 2."""
    block, _, inner = name.partition(":")
    if inner:
        return f"{path_of(spec, block)}.{inner}"
    if not block.isdigit():
        return block
    at, count = int(block), len(spec["blocks"])
    if spec["container"] == "dict":
        return f"blocks.b{at}"
    if spec["container"] == "stages":
        middle = count // 2
        stages = [middle, count - middle]
        stage = int(at >= middle)
        # An empty first list is left out.
        return f"blocks.{stage if stages[0] else 0}.{at - middle * stage}"
    return f"blocks.{at}"


def _module(spec: Spec, name: str, model: str = "net") -> str:
    return f'{model}.get_submodule("{path_of(spec, name)}")'


def _program(spec: Spec) -> list[str]:
    lines = ["def program(job):", "    model, optimizers = job.start(build)"]
    written: list[list[str]] = []
    for at, op in enumerate(spec["ops"]):
        count = inside(spec, at) if op.get("closure") else 0
        if count:
            body = [line for some in written[-count:] for line in some]
            del written[-count:]
            written.append(_step_with(spec, op, body))
        else:
            written.append(_WRITERS[op["op"]](spec, at, op))
    return [*lines, *(f"    {line}" for some in written for line in some)]


def inside(spec: Spec, at: int) -> int:
    """Return how many operations before a step its closure has: a micro-batch and what looks at its gradients."""
    ops, first = spec["ops"], at - 1
    while first >= 0 and ops[first]["op"] in ("clip", "norm"):
        first -= 1
    return at - first if first >= 0 and ops[first]["op"] == "train" and ops[first]["sync"] == "yes" else 0


def _step_with(spec: Spec, op: Spec, body: Sequence[str]) -> list[str]:
    first, *others = op["which"]
    own = ["job.step_own()"] if "ignored" in spec["options"] else []
    return [
        "def closure():",
        *(f"    {line}" for line in body),
        "    job.note_grads()",
        f"    return torch.tensor({float(op['key'])})",
        f'job.note_all("returned", optimizers[{first}].step(closure))',
        *(f"optimizers[{which}].step()" for which in others),
        *own,
    ]


def _train(spec: Spec, at: int, op: Spec) -> list[str]:
    lines = [f"for rank in job.ranks:  # {at}"]
    count = op["forwards"]
    calls = []
    for part in range(count):
        key = op["key"]
        calls.append(f"loss{part} = job.loss(model(job.data({key}, rank, {part}), {_call(op)}), rank{_badly(op)})")
    lines += [f"    {call}" for call in calls]
    losses = [f"loss{part}" for part in range(count)]
    lines[1:1] = [f"    {line}" for line in _changed(spec, op, 0)]
    lines += [f"    {line}" for line in _changed(spec, op, 1)]
    how = op["backward"]
    if how == "together" or (count == 1 and how != "retained"):
        lines.append(f"    ({' + '.join(losses)}).backward()")
    elif how == "retained":
        lines += [f"    {loss}.backward(retain_graph=True)" for loss in losses]
        lines.append(f"    ({' + '.join(losses)}).backward()")
    else:
        order = losses if how == "in order" else losses[::-1]
        lines += [f"    {loss}.backward()" for loss in order]
    if spec.get("has_buffers"):
        lines = _train_in_turn(spec, op)
    if op["sync"] != "yes":
        axis = '"replicate"' if op["sync"] == "replicate" else ""
        lines = [f"with job.no_sync({axis}):", *(f"    {line}" for line in lines)]
    return lines


def _changed(spec: Spec, op: Spec, which: int) -> list[str]:
    """Write what changes a module between its forward and its backward."""
    return [f"{_module(spec, str(op['changes']), 'model')}.which = {which}"] if "changes" in op else []


def _train_in_turn(spec: Spec, op: Spec) -> list[str]:
    """Write a micro-batch whose forwards all ranks run before the next ones, so that the oracle can equal buffers."""
    losses = [f"losses{part}" for part in range(op["forwards"])]
    lines = _changed(spec, op, 0)
    lines += [
        f"{name} = [job.loss(model(job.data({op['key']}, rank, {part}), {_call(op)}), rank{_badly(op)}) "
        "for rank in job.ranks]"
        for part, name in enumerate(losses)
    ]
    lines += _changed(spec, op, 1)
    both = f"job.backward({' + '.join(losses)})"
    if op["backward"] == "retained":
        return [*lines, *(f"job.backward({name}, retain_graph=True)" for name in losses), both]
    if op["backward"] == "together":
        return [*lines, both]
    return [*lines, *(f"job.backward({name})" for name in losses[:: 1 if op["backward"] == "in order" else -1])]


def _badly(op: Spec) -> str:
    return f", is_bad=rank in {op['bad']!r}" if "bad" in op else ""


def _mode(spec: Spec, at: int, op: Spec) -> list[str]:
    return [f"{_module(spec, op['of'], 'model') if op['of'] else 'model'}.train({op['trains']})"]


def _call(op: Spec) -> str:
    paths, choices = op["paths"], op["choices"]
    path = repr(paths[0]) if _alike(paths) else f"{paths!r}[rank]"
    choice = repr(choices[0]) if _alike(choices) else f"{choices!r}[rank]"
    recomputed = f", recomputed={op['recomputed']!r}" if op.get("recomputed") else ""
    return f"{path}, {choice}{recomputed}"


def _alike(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _fault(spec: Spec, at: int, op: Spec) -> list[str]:
    return [
        f"if job.has_faults:  # {at}",
        "    for rank in job.ranks:",
        f"        job.spoil(model(job.data({op['key']}, rank), {_call(op)}), is_bad=rank in {op['bad']!r}).backward()",
        "    for one in optimizers:",
        "        one.step()",
        "    model.zero_grad()",
    ]


def _look(spec: Spec, at: int, op: Spec) -> list[str]:
    key, mode = (
        op["key"],
        {"no_grad": "torch.no_grad()", "inference": "torch.inference_mode()", "grad": "torch.enable_grad()"},
    )
    return [
        f"with {mode[op['mode']]}:  # {at}",
        "    for rank in job.ranks:",
        f'        job.note(rank, "output", model(job.data({key}, rank), {_call(op)})[0])',
    ]


def _clip(spec: Spec, at: int, op: Spec) -> list[str]:
    of = f"{_module(spec, op['of'], 'model')}.parameters()" if op["of"] else _shared(spec)
    if op["kind"] == "value":
        return [f"nn.utils.clip_grad_value_({of}, {op['limit']})"]
    return [f'job.note_all("norm", nn.utils.clip_grad_norm_({of}, {op["limit"]}, norm_type={_order(op)}))']


def _order(op: Spec) -> str:
    return 'float("inf")' if op["p"] == "inf" else repr(op["p"])


def _norm(spec: Spec, at: int, op: Spec) -> list[str]:
    return [f'job.note_all("norm", job.grad_norm({_order(op)}))']


def _step(spec: Spec, at: int, op: Spec) -> list[str]:
    own = ["job.step_own()"] if "ignored" in spec["options"] else []
    return ["job.note_grads()", *(f"optimizers[{which}].step()" for which in op["which"]), *own]


def _zero(spec: Spec, at: int, op: Spec) -> list[str]:
    none = "" if op["to_none"] else "set_to_none=False"
    own = ["job.zero_own()"] if "ignored" in spec["options"] else []
    if op["by"] == "model":
        return [f"model.zero_grad({none})", *own]
    return ["for one in optimizers:", f"    one.zero_grad({none})", *own]


def _shared(spec: Spec) -> str:
    """Return the parameters that ranks have in common."""
    return "job.shared(model.parameters())" if "ignored" in spec["options"] else "model.parameters()"


def _rate(spec: Spec, at: int, op: Spec) -> list[str]:
    return [f"for group in optimizers[{op['which']}].param_groups:", f'    group["lr"] *= {op["factor"]}']


def _freeze(spec: Spec, at: int, op: Spec) -> list[str]:
    return [f"{_module(spec, op['of'], 'model')}.requires_grad_({not op['is_frozen']})"]


def _edit(spec: Spec, at: int, op: Spec) -> list[str]:
    return [
        "with job.gathered(writeback=True), torch.no_grad():",
        f"    for p in {_module(spec, op['of'], 'model')}.parameters():",
        f"        p.mul_({op['factor']})",
    ]


def _read(spec: Spec, at: int, op: Spec) -> list[str]:
    return [
        "with job.gathered():",
        f'    job.note_all("parameters", torch.cat([p.detach().flatten() for p in {_shared(spec)}]))',
    ]


def _resume(spec: Spec, at: int, op: Spec) -> list[str]:
    options = dict(op["options"]) | ({"ranks": op["ranks"]} if "ranks" in op else {})
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return [
        "frozen = [p.requires_grad for p in model.parameters()]",
        "modes = [(module.training, getattr(module, 'which', None)) for module in model.modules()]",
        f"model, optimizers = job.resume(build{given})",
        "for p, flag in zip(model.parameters(), frozen):",
        "    p.requires_grad_(flag)",
        "for module, (mode, which) in zip(model.modules(), modes):",
        "    module.training = mode",
        "    if which is not None:",
        "        module.which = which  # of a block that changes between forward and recomputation",
    ]


def _copies(spec: Spec, at: int, op: Spec) -> list[str]:
    return ["job.check_copies()"]


def _detach(spec: Spec, at: int, op: Spec) -> list[str]:
    return [
        f"model, optimizers = job.detach({', '.join(f'{name}={value!r}' for name, value in op['options'].items())})"
    ]


_WRITERS: Mapping[str, Callable[[Spec, int, Spec], list[str]]] = {
    "fault": _fault,
    "train": _train,
    "look": _look,
    "clip": _clip,
    "norm": _norm,
    "step": _step,
    "zero": _zero,
    "rate": _rate,
    "freeze": _freeze,
    "edit": _edit,
    "read": _read,
    "resume": _resume,
    "detach": _detach,
    "copies": _copies,
    "mode": _mode,
}
