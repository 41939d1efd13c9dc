"""Data of a page that no engine made: a step of a transformer with as many events as asked for, from a seed."""

import random
from collections.abc import Iterator
from typing import Any

COLUMNS = ["parameters", "gradients", "states", "padding", "activations", "transient"]
GIB = 2**30
BLOCKS = 32
BLOCK_NUMEL = 202_383_360
ROOT_NUMEL = 262_144_000
RANKS = 8
TOTAL_BYTES = 18 * GIB
KINDS = ("mm", "add", "gelu", "layer_norm", "flash_attention", "dropout")


class Recorder:
    """Events in the order of time, and names that are stored once."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {"": 0}
        keys = ("t_s", "nbytes", "storage", "column", "module", "tensor", "operation")
        self.events: dict[str, list[Any]] = {key: [] for key in keys}
        self.initial: dict[str, list[Any]] = {key: [] for key in keys}
        self.ticks: dict[str, list[Any]] = {"t_s": [], "kind": [], "unit": [], "nbytes": []}
        self.now_s, self.storages = 0.0, 0

    def name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def take(self, nbytes: int, column: str, module: str, tensor: str, operation: str, *, first: bool = False) -> Any:
        self.storages += 1
        entry = (nbytes, self.storages, COLUMNS.index(column), *map(self.name, (module, tensor, operation)))
        self._add(self.initial if first else self.events, entry)
        return entry

    def give(self, entry: Any) -> None:
        self._add(self.events, (-entry[0], *entry[1:]))

    def tick(self, kind: str, unit: str, nbytes: int) -> None:
        for key, value in zip(self.ticks, (self.now_s, kind, self.name(unit), nbytes), strict=True):
            self.ticks[key].append(value)

    def _add(self, events: dict[str, list[Any]], entry: Any) -> None:
        for key, value in zip(events, (self.now_s, *entry), strict=True):
            events[key].append(value)


def film(count: int, seed: int = 0) -> dict[str, Any]:
    """Return the data of a plan with exactly `count` memory events, without its other views."""
    rng = random.Random(seed)
    record = Recorder()
    for unit, numel in [("", ROOT_NUMEL), *((f"blocks.{block}", BLOCK_NUMEL) for block in range(BLOCKS))]:
        for column, width, tensor in (("parameters", 2, "weight"), ("states", 4, "master"), ("states", 8, "exp_avg")):
            record.take(numel * width // RANKS, column, unit, tensor, "shard", first=True)
    record.take(4096, "padding", "", "alignment", "shard", first=True)
    each = count // (2 * BLOCKS + 2)
    kept: dict[int, list[Any]] = {}
    phases, lanes = [], {name: lane() for name in ("compute", "gather", "reduce")}

    def busy(unit: str, seconds: float, events: int, keep: list[Any] | None) -> None:
        """Compute for a while, with temporary tensors, most of which die young."""
        start, young = record.now_s, []
        for place in range(events):
            record.now_s += seconds / events * rng.uniform(0.2, 1.8)
            if young and (len(young) > 6 or (place % 2 and rng.random() < 0.9)):
                record.give(young.pop(rng.randrange(len(young))))
            else:
                kind = rng.choice(KINDS)
                is_kept = keep is not None and rng.random() < 0.02
                nbytes = rng.randrange(2**16, 2**24)
                column = "activations" if is_kept else "transient"
                entry = record.take(
                    nbytes, column, f"{unit}.{rng.choice(['attention', 'mlp', 'norm'])}", kind, f"aten.{kind}"
                )
                (keep if is_kept and keep is not None else young).append(entry)
        for entry in young:
            record.give(entry)
        span(lanes["compute"], start, record.now_s, unit, False)

    def gather(unit: str) -> Any:
        record.tick("gather", unit, 2 * BLOCK_NUMEL // RANKS * (RANKS - 1))
        exposed = rng.random() < 0.25
        span(lanes["gather"], record.now_s, record.now_s + 0.004, unit, exposed)
        record.now_s += 0.0015 if exposed else 0
        return record.take(2 * BLOCK_NUMEL, "transient", unit, "gathered", "gather")

    reserved = BLOCKS * 2 * 16
    for phase, order in (("forward", range(BLOCKS)), ("backward", reversed(range(BLOCKS)))):
        begin = record.now_s
        for block in order:
            unit = f"blocks.{block}"
            whole = gather(unit)
            if phase == "forward":
                kept[block] = [record.take(2**26, "activations", unit, "input", "checkpoint")]
                busy(unit, 0.008, max(4, each - 16), kept[block])
            else:
                busy(unit, 0.016, max(4, each - 16), None)
                for entry in kept.pop(block):
                    record.give(entry)
                record.tick("reduce", unit, 4 * BLOCK_NUMEL // RANKS * (RANKS - 1))
                span(lanes["reduce"], record.now_s, record.now_s + 0.006, unit, block == 0)
                record.take(4 * BLOCK_NUMEL // RANKS, "gradients", unit, "grad", "reduce")
            record.give(whole)
            record.tick("release", unit, 0)
        phases.append({"name": phase, "start_s": begin, "stop_s": record.now_s})
    begin = record.now_s
    record.tick("step", "", 0)
    missing = count - len(record.events["t_s"])
    assert missing >= 0, f"{-missing} events too many with {reserved} reserved"
    for place in range(missing // 2):
        record.now_s += 0.02 / max(1, missing)
        entry = record.take(2**20 + place % 7, "transient", "", "update", "aten._fused_adamw_")
        record.give(entry)
    if missing % 2:
        record.take(512, "states", "", "step", "aten.add")
    span(lanes["compute"], begin, record.now_s, "update", False)
    phases.append({"name": "update", "start_s": begin, "stop_s": record.now_s})
    return {
        "names": list(record.names),
        "film": {"events": record.events, "initial": record.initial, "phases": phases, "ticks": record.ticks},
        "lanes": [{"name": name, "spans": spans} for name, spans in lanes.items()],
    }


def lane() -> dict[str, list[Any]]:
    return {"start_s": [], "stop_s": [], "label": [], "is_exposed": []}


def span(spans: dict[str, list[Any]], start: float, stop: float, label: str, exposed: bool) -> None:
    for key, value in zip(spans, (start, stop, label, exposed), strict=True):
        spans[key].append(value)


def plan(count: int = 4000, seed: int = 0) -> dict[str, Any]:
    """Return data for every view but the walk, which the page has."""
    rng = random.Random(seed + 1)
    numel = ROOT_NUMEL + BLOCKS * BLOCK_NUMEL
    hardware = {"name": "H100 80 GB", "capacity_bytes": 80 * 10**9, "usable_bytes": 76 * 10**9}
    resident = {"parameters": 2 * numel // 8, "gradients": 4 * numel // 8, "states": 12 * numel // 8, "padding": 4096}
    return {
        "version": 2,
        "title": "Synthetic data: a transformer of 6.7B on 8 ranks at ZeRO stage 3",
        "sources": [
            {
                "kind": "plan",
                "name": "transformer-6.7b at stage 3",
                "verdict": "fits",
                "model": {
                    "name": "transformer-6.7b",
                    "parameters_numel": numel,
                    "details": {"blocks": BLOCKS, "width": 4096},
                },
                "hardware": hardware,
                "memory": {
                    "total_bytes": TOTAL_BYTES,
                    "parts": {"parameters": 2 * numel // 8, "context, communicators": TOTAL_BYTES - 2 * numel // 8},
                },
                "results": [
                    {"what": "speed of all ranks", "value": 35_930.0, "unit": "tokens/s"},
                    {"what": "step", "value": 0.912, "unit": "s"},
                ],
                "options": {"stage": 3, "precision": "bf16", "batch": 2, "sequence": 2048},
            },
            *(
                {
                    "kind": "run",
                    "name": name,
                    "state": state,
                    "results": [{"what": "held-out loss", "value": score, "unit": "nats/token"}],
                    "options": {"stage": 3, "precision": precision, "train.clip": 1.0},
                }
                for name, state, score, precision in (
                    ("stage 3, bf16", "complete", 2.9, "bf16"),
                    ("stage 3, fp32", "interrupted", 3.1, "fp32"),
                )
            ),
        ],
        "shows": {"film": [0], "player": [0], "frontier": [0], "comparison": [1], "curves": [1, 2]},
        "columns": COLUMNS,
        "ranks": [
            {
                "name": "ranks 0 to 6",
                "count": 7,
                "resident_bytes": resident,
                "peak_bytes": 15 * GIB,
                "total_bytes": TOTAL_BYTES,
                "source": 0,
            },
            {
                "name": "rank 7",
                "count": 1,
                "resident_bytes": {**resident, "padding": 917_504},
                "peak_bytes": 15 * GIB,
                "total_bytes": TOTAL_BYTES,
                "source": 0,
            },
            {"name": "ranks 0 to 1", "count": 2, "resident_bytes": resident, "peak_bytes": None, "source": 1},
        ],
        **film(count, seed),
        "player": {
            "units": [ROOT_NUMEL] + [BLOCK_NUMEL] * BLOCKS,
            "parameter_bytes": 2,
            "gradient_bytes": 4,
            "state_bytes": 12,
            "activation": {"bytes_per_token_block": 139_264.0, "blocks": BLOCKS, "fixed_bytes_per_token": 270_336.0},
            "capacity_bytes": hardware["capacity_bytes"],
            "usable_bytes": hardware["usable_bytes"],
            "align_numel": 32,
            "p90_ratio": 1.06,
            "defaults": {"stage": 3, "ranks": 8, "batch": 2, "sequence": 2048},
            "total_bytes": TOTAL_BYTES,
        },
        "frontier": list(configurations(rng, hardware["usable_bytes"])),
        "scorecard": list(scores(rng)),
        "comparison": [
            {"what": "parameters of rank 0", "unit": "B", "predicted": 1_684_602_880, "measured": 1_684_602_880},
            {"what": "peak allocated of rank 0", "unit": "B", "predicted": 31.2 * GIB, "measured": 30.7 * GIB},
            {"what": "step", "unit": "s", "predicted": 0.912, "measured": 0.954},
            {"what": "tokens/s", "unit": "tokens/s", "predicted": 35_930, "measured": 34_340},
        ],
        "curves": [
            curve(rng, name, steps)
            for name, steps in (("stage 3, bf16", 1000), ("stage 0, bf16", 1000), ("stage 3, fp32", 600))
        ],
    }


def configurations(rng: random.Random, usable: int) -> Iterator[dict[str, Any]]:
    found = []
    for stage in range(4):
        for batch in (1, 2, 4, 8, 16):
            for recompute in ("keep", "selective", "recompute"):
                for tensor in (1, 2, 4):
                    keep = {"keep": 9.0, "selective": 4.0, "recompute": 1.2}[recompute]
                    peak = int(
                        (110 / tensor / (1 + 2.2 * stage) + keep * batch / tensor + 6) * GIB * rng.uniform(0.97, 1.03)
                    )
                    speed = (
                        52_000
                        * batch
                        / (batch + 1.5)
                        / (1 + 0.05 * stage)
                        * {"keep": 1.0, "selective": 0.95, "recompute": 0.77}[recompute]
                        * (1 - 0.06 * tensor)
                    )
                    found.append(
                        (peak, speed, {"stage": stage, "batch": batch, "activations": recompute, "tensor": tensor})
                    )
    best = max((one for one in found if one[0] < 0.95 * usable), key=lambda one: one[1])
    for one in found:
        peak, speed, options = one
        yield {
            "label": ", ".join(f"{key} {value}" for key, value in options.items()),
            "total_bytes": peak,
            "tokens_per_s": speed,
            "is_best": one is best,
            "verdict": "fits" if peak < 0.95 * usable else "tight" if peak <= usable else "no",
            "options": options,
        }


def scores(rng: random.Random) -> Iterator[dict[str, Any]]:
    for source, count, sigma in (("playbook", 30, 0.03), ("own runs", 12, 0.015), ("vendor tables", 9, 0.12)):
        for place in range(count):
            gib = rng.uniform(8, 76)
            error = rng.gauss(0, sigma)
            yield {
                "source": source,
                "label": f"row {place}",
                "metric": "peak memory",
                "unit": "B",
                "predicted": gib * GIB * (1 + error),
                "measured": gib * GIB,
            }
            if place % 2:
                step = rng.uniform(0.3, 9.0)
                yield {
                    "source": source,
                    "label": f"row {place}",
                    "metric": "step time",
                    "unit": "s",
                    "predicted": step * (1 + 2 * error),
                    "measured": step,
                }


def curve(rng: random.Random, run: str, steps: int) -> dict[str, Any]:
    losses: list[float | None] = [2.1 + 3.4 * (1 + step / 40) ** -0.8 + rng.gauss(0, 0.03) for step in range(steps)]
    if run.endswith("fp32"):
        losses[3] = None
    found = {"run": run, "step": list(range(1, steps + 1)), "loss": losses}
    if run.endswith("fp32"):
        return found
    every = list(range(100, steps + 1, 100))
    return found | {
        "learning_rate": [3e-4 * (1 - step / steps) for step in range(steps)],
        "grad_norm": [80 / (1 + step) + rng.random() for step in range(steps)],
        "tokens_per_s": [35_000 + 500 * rng.random() for _ in range(steps)],
        "memory_bytes": [float(2**30)] * steps,
        "heldout": {"step": every, "loss": [2.3 + 100 / step for step in every]},
    }
