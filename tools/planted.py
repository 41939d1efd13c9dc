"""Plant bugs in a copy of the package, one at a time, and see whether the tests that should find them do.

    python -m tools.planted
    python -m tools.planted --only flush
    python -m tools.planted --rotation common

Owns the bugs, each with its test. A test that passes with its bug, or fails without it, makes the exit status 1.

Note: places
    A place is text of a module, as short as it can be and stay the only one. Code that moves takes its bugs along: the
    error for a bug without a place says where its text is now.
Note: hangs
    A rank that waits for ever must be found, too: by the test, which fails at its own limit. A test that has none
    is stopped after `LIMIT_S` and counts as one that does not find its bug.
Note: rotations
    A case of a product that a bug names runs in each rotation (`tests/rotation.py`). A bug that names a whole product,
    or a file, must be found by the cases that the rotation has: with `--rotation` these are run, with `common` those
    that each rotation has.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import circumstances, write_result

__all__ = [
    "BUGS",
    "CHECKPOINT",
    "ENGINE",
    "MAILBOX",
    "PLAN",
    "ROOMS",
    "TWO_A_ROOM",
    "Bug",
    "main",
    "misplaced",
    "plant",
]

ROOT = Path(__file__).parents[1]
COPIED = ("benchmarks", "tests", "tools", "zeroshard", "pyproject.toml")
PASSED, FAILED, STOPPED = 0, 1, -1
LIMIT_S = 600.0
"""Of one bug's test."""


@dataclass(frozen=True)
class Bug:
    """A change of one place of a module, and the test that must fail for it.

    Args:
        file: below `zeroshard/`.
        right: what stands there, once.
        wrong: what is put instead.
        test: a test's address, as pytest takes it.
    """

    name: str
    file: str
    right: str
    wrong: str
    test: str


_DURABLE = "tests/checkpoint/test_durability.py"
CHECKPOINT = (
    Bug(
        "a file is not flushed",
        "checkpoint/writer.py",
        "                files.sync(self._descriptor)",
        "                pass",
        f"{_DURABLE}::test_a_cut_of_power_leaves_whole_checkpoints",
    ),
    Bug(
        "a checkpoint's names are not flushed",
        "checkpoint/commit.py",
        "        files.sync_folder(folder)",
        "        pass",
        f"{_DURABLE}::test_a_cut_of_power_leaves_whole_checkpoints",
    ),
    Bug(
        "the commit is not flushed",
        "checkpoint/attempt.py",
        "    files.rename(folder, path)\n    files.sync_folder(path.parent)",
        "    files.rename(folder, path)",
        f"{_DURABLE}::test_a_commit_is_on_the_disk_when_save_returns",
    ),
    Bug(
        "removed names are not flushed before files go",
        "checkpoint/commit.py",
        "    files.sync_folder(path.parent)\n    for name in",
        "    for name in",
        f"{_DURABLE}::test_a_cut_of_power_leaves_whole_checkpoints",
    ),
    Bug(
        "the rename comes before the manifest",
        "checkpoint/save.py",
        "                write_manifest(plan, folder, written)",
        "                publish(plan.path, folder)\n                write_manifest(plan, plan.path, written)\n"
        "                plan.path.rename(folder)",
        f"{_DURABLE}::test_a_cut_of_power_leaves_whole_checkpoints",
    ),
    Bug(
        "the last part of a split tensor is not written",
        "checkpoint/cuts.py",
        "for place, (start, stop) in enumerate(ranges):",
        "for place, (start, stop) in enumerate(ranges[:-1]):",
        "tests/checkpoint/test_split.py::test_messages_move_the_rows",
    ),
    Bug(
        "each rank reads the first part of a row",
        "checkpoint/cuts.py",
        "narrow(1, self._before(self.place), self.block)",
        "narrow(1, 0, self.block)",
        "tests/checkpoint/test_split.py::test_messages_move_the_rows",
    ),
    Bug(
        "groups of a packed weight are one",
        "checkpoint/cuts.py",
        "groups, ranks = slot.form.groups, mesh.tensor_ranks",
        "groups, ranks = 1, mesh.tensor_ranks",
        "tests/checkpoint/test_split.py::test_messages_move_the_rows",
    ),
    Bug(
        "gathers count as changes of a split parameter",
        "parallel/tensor.py",
        "set_local(parameter, part.data, joined)",
        "set_local(parameter, part, joined)",
        "tests/checkpoint/test_split.py::test_messages_move_the_rows",
    ),
    Bug(
        "a packed weight starts with rows of one projection",
        "parallel/standins.py",
        "if groups == 1 else",
        "if groups else",
        "tests/state/test_meta_split.py::test_values_are_those_of_one_process[(1, 2, 2)]",
    ),
    Bug(
        "a rank that fails leaves the exchange of rows",
        "checkpoint/cuts.py",
        "        for _ in self._pieces:\n            pass\n",
        "        for _ in self._pieces if kind is None else ():\n            pass\n",
        "tests/checkpoint/test_split.py::test_a_failure_on_one_rank_ends_in_one_error_on_all",
    ),
    Bug(
        "a checkpoint of a pipe drops the last place",
        "checkpoint/places.py",
        "    for place, one in enumerate(told):\n        for kind, name",
        "    for place, one in enumerate(told[:-1]):\n        for kind, name",
        "tests/checkpoint/test_pipe.py::test_offload_and_messages",
    ),
    Bug(
        "two places of a pipe have different values of one name",
        "checkpoint/places.py",
        "if values[place] != values[at[0]]:",
        "if values[place] != values[place]:",
        "tests/checkpoint/test_pipe.py::test_what_two_places_have_is_saved_once_and_must_be_equal",
    ),
    Bug(
        "a rank's error is skipped",
        "checkpoint/together.py",
        "int(failure is not None)",
        "0",
        "tests/checkpoint/test_faults.py::test_each_file_operation_of_a_save_may_fail",
    ),
    Bug(
        "a background save's failure is skipped",
        "checkpoint/save.py",
        "            if most == Status.FAILED:",
        "            if most == Status.FAILED and waits is None:",
        "tests/checkpoint/test_background.py::test_a_failure_is_raised_on_every_rank",
    ),
    Bug(
        "a written range is one element short",
        "checkpoint/inventory.py",
        "found += [(writers[place][shard], first, last) for place, first, last in parts]",
        "found += [(writers[place][shard], first, last - 1) for place, first, last in parts]",
        "tests/checkpoint/test_move.py::test_replicas_write_each_element_once",
    ),
    Bug(
        "a read range is one element short",
        "checkpoint/reader.py",
        "first, last = max(start, begin), min(stop, int(chunks.stop[place]))",
        "first, last = max(start, begin), min(stop, int(chunks.stop[place]) - (begin > 0))",
        "tests/checkpoint/test_move.py::test_every_layout_is_read_at_every_number_of_ranks",
    ),
    Bug(
        "elements may be in two files",
        "checkpoint/ranges.py",
        "is_wrong = (start != expected) | (stop <= start)",
        "is_wrong = (start > expected) | (stop <= start)",
        "tests/checkpoint/test_hostile.py::test_elements_in_two_places_are_named",
    ),
    Bug(
        "a checksum is not compared",
        "checkpoint/reader.py",
        "if (found := zlib.crc32(content)) != entry.crc32[block]:",
        "if (found := entry.crc32[block]) != entry.crc32[block]:",
        "tests/checkpoint/test_damage.py::test_a_damaged_load_changes_nothing",
    ),
    Bug(
        "a rank does not check what it reads",
        "checkpoint/load.py",
        "                content.reader.verify_range(name, start, stop, is_state=is_state)",
        "                pass",
        "tests/checkpoint/test_damage.py::test_a_damaged_load_changes_nothing",
    ),
    Bug(
        "a file that changes meanwhile is read",
        "checkpoint/reader.py",
        "            if files.identity_of(descriptor) != self._identities[name]:",
        "            if files.identity_of(descriptor) is None:",
        "tests/checkpoint/test_damage.py::test_a_file_that_changes_during_a_load_is_noticed",
    ),
    Bug(
        "links are followed",
        "checkpoint/files.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        "tests/checkpoint/test_hostile.py::test_what_is_no_file_of_a_checkpoint_is_refused",
    ),
    Bug(
        "a generator's place is not checked",
        "checkpoint/generators.py",
        "    if not 0 <= place <= WORDS:",
        "    if not 0 <= place:",
        "tests/checkpoint/test_hostile.py::test_a_hostile_generator_is_refused",
    ),
    Bug(
        "retention keeps one less",
        "checkpoint/commit.py",
        "[keep - 1 :]",
        "[keep - 2 :]",
        "tests/checkpoint/test_retention.py",
    ),
    Bug(
        "the store listens on all interfaces",
        "testing.py",
        ", master_listen_fd=listener.detach()",
        "",
        "tests/faults/test_loopback.py::test_ranks_listen_on_loopback_alone",
    ),
)
"""What `docs/reliability.md` promises, broken; some in ways that only a cut of power or another disk would show."""

_ENGINE = "tests/engine"
_BUFFERS = f"{_ENGINE}/test_module_buffers.py"
_PATHS = f"{_ENGINE}/test_paths.py::test_neither_stage_nor_transport_nor_record_changes_bits[2]"
_COPIED_PATHS = f"{_ENGINE}/test_paths.py::test_neither_do_copies_of_the_state"
_POSTPONED = f"{_ENGINE}/test_paths.py::test_what_waits_for_other_ranks_is_said_once_and_then_expected[3-True]"
_CONFORMANCE = "tests/wire/test_conformance.py"
_COPIES = f"{_ENGINE}/test_replicas.py"
_UNUSED = f"{_ENGINE}/test_unused.py::test_ranks_that_use_different_units"
_UNIT_LIMIT = f"{_ENGINE}/test_memory.py::test_at_most_two_units_besides_the_root_are_whole[2]"
_OVERWRITTEN = f"{_CONFORMANCE}::test_what_was_given_may_be_overwritten_when_a_wait_ends[host]"
_PLANNED = "tests/plan/test_events_equal.py::test_one_run_of_make_train_is_as_planned[3]"
_STEPS_OF_SGD = f"{_ENGINE}/test_parity.py::test_equals_single_process_bit_for_bit[stack-sgd-2-cpu]"
_ELSEWHERE = "test_runs_with_parameters_elsewhere_equal_resident_ones"
_FROZEN = "tests/plan/test_frozen.py::test_the_plan_is_the_run"
_CHANGED = "tests/engine/test_changed_gradients.py::test_gradients_that"
ENGINE = (
    Bug(
        "a change of a converted gradient is lost",
        "core/gradient.py",
        "                if version_of(one) != version:",
        "                if version_of(one) < version:",
        f"{_CHANGED}_are_converted_for_an_update_keep_its_changes",
    ),
    Bug(
        "a gradient that an optimizer of whole parameters drops stays",
        "update/exchange.py",
        "            master.grad = None",
        "            pass",
        f"{_CHANGED}_owners_change_where_each_rank_updates_all[2]",
    ),
    Bug(
        "offload on a CPU chooses other kernels",
        "update/kernels.py",
        ' and one.device.type != "cpu"',
        "",
        "tests/engine/test_offload_optimizers.py::test_defaults_of_torch_have_the_same_bits_with_offload",
    ),
    Bug(
        "detach() drops a gradient that user code has assigned",
        "whole/detach.py",
        "s in engine.assigned or ",
        "",
        "tests/state/test_detach.py::test_an_assigned_gradient_that_no_step_has_applied_is_an_error",
    ),
    # Plans: what the engine does, from the same records.
    Bug(
        "a plan counts states of frozen parameters",
        "table/bytes.py",
        "return bucket.is_reduced and (bucket.number",
        "return (bucket.number",
        f"{_FROZEN}[lora-everything-0-2]",
    ),
    Bug(
        "a plan publishes frozen parameters",
        "table/spec.py",
        "replace(b, is_updated=b.number in numbers)",
        "replace(b, is_updated=True)",
        f"{_FROZEN}[partly-trained-1-2]",
    ),
    Bug(
        "values of a recomputation are not compared",
        "activations/trail.py",
        "flag = number in self._sums and",
        "flag = number in () and",
        "tests/activations/test_each_time.py::test_what_differs_at_step_50_is_an_error[OtherScalar-0]",
    ),
    Bug(
        "layers of a recomputation are not compared",
        "activations/trail.py",
        "self._again[number] != self._places[number]",
        "self._again[number] != self._again[number]",
        "tests/activations/test_each_time.py::test_what_differs_at_step_50_is_an_error[OtherLastLayer-0]",
    ),
    Bug(
        "buffers are offloaded as activations are",
        "activations/chain.py",
        "not in own] if own else sound",
        "not in own] if not sound else sound",
        "tests/activations/test_batch_norm.py::test_both_modes_in_one_forward[offload]",
    ),
    # Order: what all ranks agreed on, and what one rank of them does alone.
    Bug(
        "flush() is removed",
        "core/order.py",
        "self._do(pass_.schedule.flush())",
        "pass",
        _PATHS,
    ),
    Bug(
        "hoist is removed",
        "core/passes.py",
        "hoist(requests) if self.is_first",
        "tuple(requests) if self.is_first",
        f"{_ENGINE}/test_trace.py::test_the_next_unit_is_on_its_way_before_the_last_one_is_reduced[True]",
    ),
    Bug(
        "a rank that is not ready for a reduction gives what it has",
        "core/order.py",
        "is_ready = pass_.is_closing or not self._comm.can_postpone or unit.is_complete()",
        "is_ready = True",
        _PATHS,
    ),
    Bug(
        "a rank that leaves the record gathers alone",
        "core/order.py",
        'self._ask("gather", unit, is_again)',
        'self._do([("gather", unit)])',
        f"{_UNUSED}[other_orders_on_each_rank-2]",
    ),
    Bug(
        "a rank waits in a round for one that waits for its sum",
        "core/order.py",
        "self._finish_all()\n        if pass_.has_asked:",
        "if pass_.has_asked:",
        _COPIED_PATHS,
    ),
    Bug(
        "what no rank foresaw is not reduced at the end",
        "core/order.py",
        "if is_reduced and self._units[unit].has_local)",
        "if False)",
        f"{_UNUSED}[one_block_on_one_rank_only-2]",
    ),
    Bug(
        "a pass that is over keeps what it serves",
        "core/order.py",
        "pass_.expected.clear()",
        "pass",
        f"{_ENGINE}/test_unused.py::test_what_a_rank_gathers_for_others_after_its_backward_is_released",
    ),
    Bug(
        "a reduction that came too early stays where it is in the record",
        "core/passes.py",
        "requests = [r for r in requests if r != request] + [request]",
        "pass",
        _POSTPONED,
    ),
    Bug(
        "a unit that a rank asked for again is not recorded as one that stays",
        "core/passes.py",
        "pinned.add(unit)",
        "pass",
        _POSTPONED,
    ),
    Bug(
        "a unit that the record pins is released",
        "table/schedule.py",
        "record.pinned | {ROOT}",
        "frozenset({ROOT})",
        "tests/table/test_schedule.py::test_a_tied_unit_stays_whole_and_takes_no_room",
    ),
    Bug(
        "three units are whole besides the root",
        "table/schedule.py",
        " < size",
        " <= size",
        "tests/table/test_schedule.py::test_the_fourth_unit_waits_for_room",
    ),
    Bug(
        "a unit that a rank skips stays whole",
        "table/schedule.py",
        "if not is_used and other not in self._kept | self.carried:",
        "if False:",
        "tests/table/test_schedule.py::test_a_rank_that_skips_a_unit_takes_part_in_its_gather",
    ),
    Bug(
        "a unit that is held to its backward is released",
        "table/schedule.py",
        "if unit in self.held and self.keeps:",
        "if False:",
        "tests/table/test_schedule.py::test_a_held_unit_that_a_rank_skips_stays_whole_too",
    ),
    Bug(
        "used parameters are not agreed",
        "core/order.py",
        "[not flag for flag in rest[: len(agreed)]], -greatest",
        "agreed, -greatest",
        f"{_UNUSED}[other_blocks_on_each_rank-2]",
    ),
    # The trace: it is written by what happens, so that the plan's events cannot equal those of an engine that skips.
    Bug(
        "a gather sends nothing",
        "core/unit.py",
        "self._pending.append(bucket.brought(partial(comm.gather, bucket.full, tag, kind), self.name))",
        "self._pending.append(Pending(lambda: None))",
        _PLANNED,
    ),
    Bug(
        "a reduction sends nothing",
        "core/unit.py",
        "comm.reduce(full, own, bucket.codec, scale, tag)",
        "Pending(lambda: None)",
        _PLANNED,
    ),
    Bug(
        "a release keeps the memory",
        "core/unit.py",
        "nbytes += bucket.close()",
        "pass",
        _PLANNED,
    ),
    Bug(
        "an update is published by half of the units",
        "core/unit.py",
        "if b.spec.is_published and (is_forced or b.has_states)]",
        "if b.spec.is_published and (is_forced or b.has_states) and self.number % 2]",
        _PLANNED.replace("[3]", "[2]"),
    ),
    # Waits: memory that something still travels from or into.
    Bug(
        "a sum is read while it is under way",
        "core/unit.py",
        "are_ready.append(pending.wait())",
        "are_ready.append(True)",
        f"{_ENGINE}/test_accumulation.py::test_accumulation[each_backward_reduces-2]",
    ),
    Bug(
        "sums over replicas are waited for at once",
        "core/unit.py",
        "return not self.copies",
        "return True",
        f"{_ENGINE}/test_replicas_overlap.py::test_a_unit_of_computation_lies_between[3-fp32-1]",
    ),
    Bug(
        "published parameters are waited for at once",
        "core/unit.py",
        "if is_forced or not pending or not (",
        "if is_forced or comm or not (",
        f"{_ENGINE}/test_publish_overlap.py::test_each_unit_is_waited_for_at_its_entry[1-Block-1]",
    ),
    Bug(
        "gradients that leave a device are waited for at once",
        "store/landing.py",
        "[one for one in self._under_way if one not in (owner, last)]",
        "[*self._under_way]",
        f"{_ENGINE}/test_overlap.py::test_only_the_ends_of_a_pass_are_exposed[stage 3, float32, offload]",
    ),
    Bug(
        "pinned memory of a gradient that is in use is handed out again",
        "store/landing.py",
        "(one for one in blocks if users_of_storage(one) == 1)",
        "iter(blocks)",
        f"{_ENGINE}/test_offload_leaving.py::test_gradients_that_leave_late_change_no_bit[leaves-out-1]",
    ),
    Bug(
        "what comes back is added to before it is there",
        "store/landing.py",
        "            for one in after[1:]:\n                one.wait()\n            if room",
        "            if room",
        "tests/emulated/test_devices.py::test_states_elsewhere_train_as_on_the_device",
    ),
    Bug(
        "a slice's gradient that was read before is read before it is there",
        "core/slices.py",
        "        part = part_of(slot)\n        if grads",
        "        part = slot.master_grad\n        if part is None:\n            part = part_of(slot)\n        if grads",
        f"{_ENGINE}/test_offload_leaving.py::test_whoever_reads_gradients_waits_for_them[zeros]",
    ),
    Bug(
        "gradients come back before they have left",
        "store/landing.py",
        "for one in (buffer.copied, written)",
        "for one in (buffer.copied,)",
        f"{_ENGINE}/test_offload_leaving.py::test_gradients_come_back_after_they_have_left",
    ),
    Bug(
        "a buffer is filled before the copy from it is over",
        "store/landing.py",
        "for one in (buffer.copied, written)",
        "for one in (begun, written)",
        f"{_ENGINE}/test_offload_leaving.py::test_gradients_that_leave_late_change_no_bit[accumulates-1]",
    ),
    Bug(
        "reads of published parameters do not wait",
        "core/unit.py",
        "classes[presence is not Presence.WHOLE]",
        "classes[presence is Presence.RELEASED]",
        f"{_ENGINE}/test_publish_overlap.py::test_what_follows_a_step_waits[1]",
    ),
    Bug(
        "modules do not wait for their published parameters",
        "core/hooks.py",
        "            if unit.is_coming:",
        "            if not unit:",
        f"{_ENGINE}/test_publish_overlap.py::test_each_unit_is_waited_for_at_its_entry[1-Extension-1]",
    ),
    Bug(
        "several reductions are under way at once",
        "core/order.py",
        'if kind == "reduce":\n                self._finish_all(before=unit)\n            before',
        "before",
        _UNIT_LIMIT,
    ),
    Bug(
        "a unit is released while its gather is under way",
        "core/unit.py",
        "self.wait()\n        for bucket in",
        "for bucket in",
        _PATHS,
    ),
    Bug(
        "gathered sums are used while they are under way",
        "core/order.py",
        "tail.wait()",
        "pass",
        _STEPS_OF_SGD,
    ),
    Bug(
        "published parameters are used while they are under way",
        "core/order.py",
        "one.wait()",
        "pass",
        _STEPS_OF_SGD,
    ),
    Bug(
        "messages of a gather are not awaited",
        "wire/gloo.py",
        "Pending(lambda: self.links.wait(works, tag.what))",
        "Pending(lambda: None)",
        f"{_CONFORMANCE}::test_a_transport_does_what_the_engine_asks_for[2-1-messages]",
    ),
    Bug(
        "a reduction ends while another rank reads",
        "wire/host.py",
        "            self._all_have_read(tag, Tag.REDUCE)\n            return",
        "            return",
        _OVERWRITTEN,
    ),
    Bug(
        "a gather ends while another rank reads",
        "wire/host.py",
        "self._all_have_read(tag, Tag.GATHER)",
        "pass",
        _OVERWRITTEN,
    ),
    Bug(
        "a wait has no limit",
        "wire/links.py",
        "work.wait(self._limit)",
        "work.wait(timedelta(hours=1))",
        f"{_ENGINE}/test_watchdog.py::test_a_rank_whose_data_ended_early[3]",
    ),
    Bug(
        "a rank that is ahead holds up the others",
        "wire/board.py",
        "return 0 < ((said >> ABOUT_BITS) - (word >> ABOUT_BITS)) % TURNS < TURNS // 2",
        "return word != said",
        "tests/wire/test_board.py::test_a_rank_that_is_ahead_does_not_hold_up_the_others",
    ),
    # Gradients.
    Bug(
        "a late gradient lands in the message under way",
        "core/grads.py",
        "self.local, self._views = None, []  # views would keep a gradient that autograd allocated\n",
        "\n",
        f"{_ENGINE}/test_accumulation.py::test_accumulation[each_backward_reduces-2]",
    ),
    Bug(
        "a missing gradient is what lay there before",
        "core/grads.py",
        "self._views[index].zero_()",
        "pass",
        f"{_UNUSED}[other_blocks_on_each_rank-2]",
    ),
    Bug(
        "a sum is added to what is left from before zero_grad",
        "core/grads.py",
        "self.part(index).zero_()",
        "pass",
        f"{_ENGINE}/test_accumulation.py::test_accumulation[forgotten_in_part-2]",
    ),
    Bug(
        "what is taken back has lost its flags",
        "core/grads.py",
        "local.views, local.own, local.sums",
        "local.views, local.own, self.sums",
        _PATHS,
    ),
    Bug(
        "the buffer of a sum is not given back",
        "core/grads.py",
        "            self._pool.give(local.full)\n",
        "",
        _UNIT_LIMIT,
    ),
    Bug(
        "zero_grad keeps the memory of gradients",
        "core/grads.py",
        "            self._let_go()",
        "            pass",
        f"{_ENGINE}/test_memory.py::test_zero_grad_gives_the_memory_of_gradients_back[2-True-False]",
    ),
    Bug(
        "norms outlive their gradients",
        "core/norms.py",
        "self._known.clear()",
        "pass",
        f"{_ENGINE}/test_clipping.py::test_each_step_has_a_norm_of_its_own",
    ),
    Bug(
        "a change in place is gone with the release",
        "core/unit.py",
        "bucket.changes.restore()",
        "pass",
        f"{_ENGINE}/test_changes.py::test_the_same_change_on_all_ranks_is_kept",
    ),
    Bug(
        "a saved tensor that changed is used",
        "core/saved.py",
        "if treatment is None and version_of(packed.value) != packed.version:",
        "if False:",
        f"{_ENGINE}/test_graphs.py::test_what_torch_refuses_is_refused[saved_tensor_changed_in_place]",
    ),
    Bug(
        "an output that changed stands for an input",
        "activations/recompute.py",
        "if known() is tensor and version_of(tensor) == version:",
        "if known() is tensor:",
        "tests/activations/test_parity.py::test_outputs_may_be_changed_in_place_and_backward_repeated[activations2]",
    ),
    Bug(
        "a product that changed through an unsafe alias is used",
        "activations/products.py",
        "is_lost = known.kept is None or known.is_changed()",
        "is_lost = known.kept is None",
        "tests/activations/test_products.py::test_a_result_that_is_changed_in_place_is_computed_again",
    ),
    Bug(
        "random numbers of a recomputation are others",
        "activations/recompute.py",
        "use_reentrant=False, context_fn=self._contexts)",
        "use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts)",
        "tests/activations/test_parity.py::test_treatments_change_no_bit[every unit-1]",
    ),
    Bug(
        "parts of other values are gathered",
        "activations/partition.py",
        "if bool((rows != rows[0]).any()):",
        "if False:",
        "tests/activations/test_partition.py::test_inputs_that_differ_along_the_tensor_axis_are_refused_by_name",
    ),
    Bug(
        "the part of another rank is kept",
        "activations/partition.py",
        "part[: mine.numel()] = mine",
        "part[: mine.numel()] = flat[: mine.numel()]",
        "tests/activations/test_partition.py::test_partition_changes_no_bit[shard-1]",
    ),
    Bug(
        "a piece of a reduction is left out",
        "wire/gloo.py",
        "for piece in pieces[1:])",
        "for piece in pieces[2:])",
        "tests/engine/test_constant_buffers.py::test_pieces_change_no_bit",
    ),
    Bug(
        "a saved parameter that a step changed is used",
        "core/saved.py",
        "packed.bucket.updates != packed.updates:",
        "False:",
        f"{_ENGINE}/test_graphs.py::test_what_torch_refuses_is_refused[step_between_forward_and_backward]",
    ),
    # Copies of the state.
    Bug(
        "sums over copies are not scaled",
        "core/unit.py",
        "bucket.codec, self.scale, tag",
        "bucket.codec, 1.0, tag",
        f"{_COPIES}::test_two_replicas_of_two_train_as_one_copy_over_four[3]",
    ),
    Bug(
        "deferred sums are made twice",
        "core/unit.py",
        "scope = min(grads.scope, self.scope)",
        "scope = self.scope",
        f"{_COPIES}::test_sums_over_copies_can_wait_for_the_last_micro_batch[2]",
    ),
    Bug(
        "deferred sums are not finished",
        "core/order.py",
        "        if pass_.scope is Scope.ALL:",
        "        if False:",
        f"{_COPIES}::test_sums_over_copies_can_wait_for_the_last_micro_batch[2]",
    ),
    Bug(
        "a copy that is not ready loses its sum",
        "core/grads.py",
        "(copies > 1 and place",
        "(copies > 9 and place",
        _COPIED_PATHS,
    ),
    # Steps.
    Bug(
        "the vote before an update is ignored",
        "update/optimizer.py",
        "settle(place, detail, is_fine=lambda: guard.is_fine(optimizer, masters, scale))",
        "settle(place, detail)",
        "tests/faults/test_differ.py::test_what_is_no_number_changes_nothing_on_any_rank[nan-2]",
    ),
    Bug(
        "only the rank of an overflow skips the step",
        "core/order.py",
        "return least == 0",
        "return is_fine()",
        f"{_ENGINE}/test_precision.py::test_an_overflow_of_any_parameter_on_any_rank_skips_the_step_on_all[backward-2]",
    ),
    Bug(
        "gradients that were kept after a skipped step are not looked at",
        "update/optimizer.py",
        "grads.is_suspect = grads.has_any",
        "grads.is_suspect = False",
        f"{_ENGINE}/test_kept_overflow.py::test_gradients_of_a_skipped_step_are_not_used[accumulate]",
    ),
    Bug(
        "a clip hides the infinity of a gradient that was kept",
        "core/grads.py",
        "self.own_shard() if self.is_suspect else own",
        "own",
        f"{_ENGINE}/test_kept_overflow.py::test_gradients_of_a_skipped_step_are_not_used[clip_by_value]",
    ),
    Bug(
        "the host reads no flags before updates on the host, after a skipped step",
        "core/guard.py",
        "        self.skipped += 1\n",
        "        self.skipped += 1\n        self.updates_on_host = False\n",
        f"{_ENGINE}/test_skip.py::test_updates_on_the_host_wait_after_a_skipped_step",
    ),
    Bug(
        "an optimizer's step calls its closure again",
        "update/closures.py",
        "return ((optimizer, computed), kwargs) if rest else",
        "return None if rest else",
        f"{_ENGINE}/test_closures.py::test_a_closure_is_called_once_before_the_update[accumulates-True]",
    ),
    Bug(
        "a closure runs after the pieces of an update",
        "update/optimizer.py",
        "arguments = call_closure(self._engine.mesh, args, kwargs, self.put_back)\n        self._update(optimizer)",
        "self._update(optimizer)\n        arguments = call_closure(self._engine.mesh, args, kwargs, self.put_back)",
        f"{_ENGINE}/test_update.py::test_a_closure_runs_before_any_piece",
    ),
    Bug(
        "the step of a class that another extends is a second step",
        "update/optimizer.py",
        "            self._inner_steps += 1\n            return None\n",
        "            pass\n",
        f"{_ENGINE}/test_extended_steps.py::test_it_is_one_step[messages]",
    ),
    Bug(
        "one unit is not published",
        "update/optimizer.py",
        "engine.order.publish(numbers, start)",
        "engine.order.publish(numbers[:-1], start)",
        _STEPS_OF_SGD,
    ),
    Bug(
        "masters are not rounded into parameters",
        "update/optimizer.py",
        "bucket.follow_masters(is_filed_done=self.source.disk is not None)",
        "pass",
        f"{_ENGINE}/test_precision.py::test_training_equals_a_single_process_that_casts_alike[bf16-2]",
    ),
    # Offload.
    Bug(
        "parameters elsewhere are not brought before the gather",
        "core/buffer.py",
        "return self._home.brought(self.own, self.shard, begin, unit)",
        "return begin()",
        f"{_ENGINE}/test_offload_parameters.py::{_ELSEWHERE}[accumulates-2-host]",
    ),
    Bug(
        "parameters elsewhere do not follow their masters",
        "core/buffer.py",
        "if self.spec.has_masters and not is_done and",
        "if self.spec.has_masters and not is_done and self.spec.row.parameters.is_on_device and",
        f"{_ENGINE}/test_offload_parameters.py::{_ELSEWHERE}[bf16-1-host]",
    ),
    Bug(
        "all states of a bucket are loaded to its first place",
        "core/buffer.py",
        "return self.array(key, dtype)[start - self.spec.states[0] : stop - self.spec.states[0]]",
        "return self.array(key, dtype)[: stop - start]",
        f"{_ENGINE}/test_offload_states.py::test_checkpoints_are_ordinary_ones[leaves-out-1-3-host]",
    ),
    Bug(
        "a unit is gathered before its update in the background",
        "core/unit.py",
        "bucket.await_update()",
        "pass",
        f"{_ENGINE}/test_offload_background.py::test_each_unit_waits_for_its_own_update",
    ),
    Bug(
        "a scheduler reaches the update in the background",
        "update/background.py",
        "value.clone() if isinstance(value, Tensor) else value",
        "value",
        f"{_ENGINE}/test_offload_background.py::test_rates_that_change_afterwards_count_from_the_next_step_on",
    ),
    # Whole matrices.
    Bug(
        "new values of a matrix are not put into its slices",
        "update/exchange.py",
        "foreach_copy_(self._parts, self._cut(",
        "foreach_copy_([*map(torch.empty_like, self._parts)], self._cut(",
        f"{_ENGINE}/test_whole.py::test_torchs_own_optimizers_at_all_stages[muon-2]",
    ),
    Bug(
        "matrices of one owner are mixed up",
        "update/exchange.py",
        "[*cuts[place :: len(parts)]]",
        "[*cuts[-1 - place :: len(parts)]]",
        f"{_ENGINE}/test_whole.py::test_torchs_own_optimizers_at_all_stages[adafactor-2]",
    ),
    Bug(
        "states of a matrix are forgotten at each step",
        "update/exchange.py",
        "state[one.master] = _moved(state.pop(one.entry), one.master.device)",
        "state.pop(one.entry)",
        f"{_ENGINE}/test_whole.py::test_torchs_own_optimizers_at_all_stages[muon-2]",
    ),
    Bug(
        "entries stay out of their groups after a step in pieces",
        "optim/pieces.py",
        "    except BaseException:\n        put(kept)",
        "    except BaseException:\n        pass",
        f"{_ENGINE}/test_update.py::test_an_exception_puts_the_entries_back",
    ),
    Bug(
        "messages to owners are not awaited",
        "wire/gloo.py",
        "Pending(lambda: self.links.wait(messages, tag.what))",
        "Pending(lambda: self.links.wait([], tag.what))",
        f"{_CONFORMANCE}::test_a_transport_does_what_the_engine_asks_for[2-1-messages]",
    ),
    Bug(
        "a route ends while another rank reads",
        "wire/host.py",
        "self._all_have_read(tag, kind=Tag.GATHER)",
        "pass",
        _OVERWRITTEN,
    ),
    # Transports.
    Bug(
        "a tag has no number of its pass",
        "wire/comm.py",
        "self.number % self.PASSES * self.BUCKETS + self.bucket",
        "self.bucket",
        f"{_ENGINE}/test_limits.py::test_tags_fit_into_what_carries_them[0]",
    ),
    Bug(
        "sums are made in the dtype of the wire",
        "wire/gloo.py",
        "dtype = torch.promote_types(own.dtype, torch.float32)",
        "dtype = codec.dtype",
        f"{_CONFORMANCE}::test_a_transport_does_what_the_engine_asks_for[3-1-messages]",
    ),
    Bug(
        "a rank adds its own part first",
        "wire/gloo.py",
        "[blocks[peer] for peer in range(len(ranks))]",
        "[blocks.pop(place), *blocks.values()]",
        f"{_CONFORMANCE}::test_a_transport_does_what_the_engine_asks_for[3-1-messages]",
    ),
    Bug(
        "pages of a released unit stay",
        "wire/memory.py",
        "slab.madvise(mmap.MADV_DONTNEED, first, nbytes)",
        "pass",
        "tests/wire/test_memory.py::test_a_closed_tensor_takes_no_memory",
    ),
    Bug(
        "buffers of ranks besides the first stay their own",
        "whole/module_buffers.py",
        "self._write(buffers, [message])",
        "pass",
        f"{_BUFFERS}::test_evaluation_equals_ddps_on_every_rank[one]",
    ),
    Bug(
        "a recomputed call does not keep its unit",
        "core/engine.py",
        "if not unit.calls and not unit.recomputed:",
        "if not unit.calls:",
        "tests/activations/test_parity.py::test_backwards_may_follow_later_forwards[recompute-sqrt]",
    ),
    Bug(
        "recomputations read the buffers of a later forward",
        "whole/module_buffers.py",
        "self._preserve([one for _, one in buffers])",
        "pass",
        f"{_BUFFERS}::test_recomputations_read_what_their_forward_read",
    ),
    Bug(
        "statistics that a backward reads follow before the next forward",
        "whole/module_buffers.py",
        "if place in self._silent and (module := self._places[place][1]) in self._read and not module.training:",
        "if False:",
        f"{_BUFFERS}::test_statistics_that_a_backward_reads_follow_at_the_step",
    ),
    Bug(
        "statistics under other names are not looked for",
        "whole/module_buffers.py",
        "self._silent.add(place)",
        "pass",
        f"{_BUFFERS}::test_norms_that_begin_to_train_later_follow",
    ),
    Bug(
        "buffers follow under no_sync",
        "core/engine.py",
        "has_grad and module.training and self.scope is Scope.ALL",
        "has_grad and module.training",
        f"{_BUFFERS}::test_evaluation_equals_ddps_on_every_rank[no_sync]",
    ),
    Bug(
        "detach() forgets the states",
        "whole/detach.py",
        "                if self._keeps and slot.name in whole:",
        "                if not self._keeps:",
        "tests/state/test_detach.py::test_training_continues_plain_and_at_another_stage[host-1]",
    ),
    Bug(
        "Accelerate's autocast is not looked at",
        "setup/autocast.py",
        'if precision == "no" or',
        "if precision or",
        "tests/integrations/test_stock.py::test_an_autocast_that_accelerate_does_not_apply_is_refused",
    ),
    Bug(
        "memory that a kept state_dict reads is released",
        "core/buffer.py",
        "if not self.is_lent() and not self._memory.close(self.full)",
        "if not self._memory.close(self.full)",
        "tests/state/test_foreign_files.py::test_a_state_dict_may_be_kept",
    ),
    Bug(
        "memory that was not released is moved",
        "wire/memory.py",
        "storage.resizable() and storage.nbytes() < full.nbytes",
        "storage.resizable()",
        "tests/state/test_foreign_files.py::test_a_state_dict_may_be_kept",
    ),
)
"""What `docs/design.md` promises of passes and exchanges, broken: other bits, a rank that waits for ever, memory."""

_DOMAINS, _PIPE = "tests/engine/test_domains.py", "tests/engine/test_pipe.py"
_ALIKE = f"{_ENGINE}/test_tensor_alike.py"
_OUTER = "tests/outer"
ROOMS = (
    Bug(
        "a plan counts states of parameters that no forward uses",
        "table/bytes.py",
        " and (bucket.number, index) not in self.unused",
        "",
        f"{_FROZEN.partition('::')[0]}::test_parameters_that_no_forward_uses_have_no_states[trained-0-0]",
    ),
    Bug(
        "causal attention counts masked blocks",
        "plan/trace/recorder.py",
        "return flops / 2 if",
        "return flops if",
        "tests/plan/test_planning.py::test_causal_attention_is_half_the_work[h100]",
    ),
    Bug(
        "a loop over parameters drops what it holds of the last one",
        "plan/named.py",
        "passing.own * numel + passing.before * before",
        "passing.own * numel",
        "tests/plan/test_passing.py::test_the_temporary_memory_of_an_update_is_that_of_a_run[NAdam]",
    ),
    Bug(
        "a sum that is still to come counts as made",
        "core/grads.py",
        "USED if is_used and held is not STALE else held",
        "USED if is_used else held",
        "tests/engine/test_pipeline_reduce.py::test_an_expert_of_one_early_micro_batch_has_its_sum_with_the_last",
    ),
    Bug(
        "split and replicated parameters share a bucket of a codec",
        "describe/specs.py",
        "formats.reduce in CODECS and numel_of(parameter) != parameter.numel()",
        "False",
        "tests/state/test_copies_along_tensor.py::test_rounded_gradients_of_what_ranks_have_alike_are_alike",
    ),
    Bug(
        "a tied weight is looked for among what is trained at first",
        "parallel/tied.py",
        "self._all = shared",
        "self._all = {one: ranks for one, ranks in shared.items() if one.requires_grad}",
        "tests/engine/test_pipeline.py::test_a_tied_weight_that_is_trained_later_is_one_parameter",
    ),
    Bug(
        "an entry of an optimizer has a flag of its own",
        "core/slices.py",
        "slot_of(self).parameter.requires_grad = value",
        "pass",
        "tests/engine/test_unused.py::test_groups_freeze_wherever_slices_lie[host]",
    ),
    Bug(
        "a gather ahead of use is for a graph of one rank",
        "activations/chain.py",
        "is_earlier or previous._unit >= unit",
        "False",
        "tests/activations/test_partition.py::test_graphs_of_other_forwards_may_live_as_long_as_they_like[3-False-True]",
    ),
    Bug(
        "each chunk of a pipe changes the same inputs",
        "parallel/batch.py",
        "lambda t: t[rows].clone()",
        "lambda t: t[rows]",
        f"{_ENGINE}/test_pipeline_hidden.py::test_what_a_pipe_sees_trains[options1]",
    ),
    Bug(
        "a place of a pipe knows what was trained at first",
        "parallel/messages.py",
        "        self._before[chunk] = trained\n",
        "",
        f"{_ENGINE}/test_pipeline_freezing.py::test_what_is_frozen_at_first_may_be_trained_later[case1]",
    ),
    Bug(
        "values that an optimizer assigns stay outside the bucket",
        "update/optimizer.py",
        "                kept.copy_(master.detach())\n",
        "",
        f"{_ENGINE}/test_optimizers.py::test_optimizers_of_others[assigned-2]",
    ),
    Bug(
        "a failed save is raised after the update",
        "checkpoint/save.py",
        "register_step_pre_hook(lambda *_: self._settle",
        "register_step_post_hook(lambda *_: self._settle",
        "tests/checkpoint/test_background.py::test_a_step_that_raises_has_changed_nothing",
    ),
    Bug(
        "a position in the data forgets the batch size",
        "loader.py",
        "read = read * before[0] // size",
        "pass",
        "tests/checkpoint/test_options.py::test_another_batch_size_reads_what_is_left[2-4]",
    ),
    Bug(
        "a position in the data forgets numpy's generator",
        "loader.py",
        "{**now, **self._start}",
        '{**now, "torch": self._start["torch"]}',
        "tests/checkpoint/test_options.py::test_an_order_of_any_generator_continues[sampler, numpy]",
    ),
    Bug(
        "a copy in another memory order is derived",
        "describe/saved_nodes.py",
        "(is_copied and not _has_same_order(root, tensor))",
        "False",
        "tests/activations/test_compress.py::test_a_copy_in_another_order_is_not_derived[False]",
    ),
    Bug(
        "tensors that share memory are set apart",
        "setup/request.py",
        "if place < last_stop and (trains or is_trained):",
        "if place < 0:",
        "tests/engine/test_refused.py::test_tensors_that_share_memory_are_refused_by_name[transposed]",
    ),
    Bug(
        "a recomputed forward may change a parameter",
        "activations/surroundings.py",
        "if any(version_of(one) != version for one, version in self._parameters):",
        "if False:",
        "tests/engine/test_refused.py::test_a_recomputed_forward_that_changes_a_parameter_is_refused[False-recompute]",
    ),
    Bug(
        "gradients lose their conjugation",
        "torch_private.py",
        "return tensor.is_conj() or tensor.is_neg()",
        "return False",
        "tests/engine/test_lazy_values.py::test_values_are_those_of_plain_torch[1-('Tied', 1, 3)]",
    ),
    Bug(
        "a loader's own generator goes on",
        "loader.py",
        "own.set_state(state)",
        "pass",
        "tests/checkpoint/test_options.py::test_each_epoch_continues[its own generator]",
    ),
    Bug(
        "results of experts are not summed",
        "plan/shape/transformer.py",
        'summed = Exchange("all-reduce", nbytes) if write.t > 1',
        'summed = Exchange("all-reduce", nbytes) if write.t > 1000',
        "tests/plan/test_tape.py::test_results_of_experts_are_summed_over_the_tensor_ranks[False]",
    ),
    Bug(
        "what rounding loses of an island's change is dropped",
        "outer/formula.py",
        "        change += lost\n",
        "        lost *= 0.0\n",
        f"{_OUTER}/test_oracle.py::test_two_islands_of_one_rank[8 bits]",
    ),
    Bug(
        "an island keeps its own bits where the others have rounded ones",
        "outer/exchange.py",
        " = self._sum(tag) if is_summed else self._gather(tag)\n",
        """ = None
        done, lost = self._gather(tag), fragment.lost
        self._finish = lambda: done() + (0.0 if lost is None else lost / comm.mesh.world_size)
""",
        f"{_OUTER}/test_oracle.py::test_two_islands_of_one_rank[8 bits]",
    ),
    Bug(
        "an exchange between islands is a step late",
        "outer/islands.py",
        "divmod(self.steps + options.delay, ",
        "divmod(self.steps + options.delay - 1, ",
        f"{_OUTER}/test_oracle.py::test_averages_in_fp32_are_equal_bit_for_bit[3-1]",
    ),
    Bug(
        "a vote crosses islands in each step",
        "outer/islands.py",
        "        options = self.options\n        turn, rest",
        '        options = self.options\n        self.comm.agree([0], "a step")\n        turn, rest',
        f"{_OUTER}/test_refused.py::test_islands_wait_for_each_other_in_exchanges_alone",
    ),
    Bug(
        "copies of a model have the mark that Accelerate looks for",
        "accelerate_private.py",
        "if name not in (PREPARED, NO_SYNC, _COPIED)",
        "if name not in (NO_SYNC, _COPIED)",
        "tests/integrations/test_accelerate.py::test_copies_and_a_detached_model_have_no_mark",
    ),
    Bug(
        "a save of Accelerate leaves the folder of an earlier one",
        "integrations/accelerate.py",
        "            shutil.rmtree(folders[-1] / FOLDER, ignore_errors=True)\n",
        "",
        "tests/integrations/test_accelerate.py::test_an_earlier_save_is_not_loaded_with_later_files",
    ),
    Bug(
        "the ranks of a domain are taken for the first ones of the launch",
        "wire/links.py",
        "[self.mesh.numbers[place] for place in places]",
        "[*places]",
        f"{_DOMAINS}::test_handles_of_a_process_have_ranks_of_their_own",
    ),
    Bug(
        "a process group has the name that the process's number of groups makes",
        "torch_groups.py",
        """{store.add(f'{name}/{own}', 1)}""",
        """{len(all_groups())}""",
        f"{_DOMAINS}::test_a_process_may_train_models_with_several_others",
    ),
    Bug(
        "norms count what ranks along tensor have alike on each",
        "core/slot.py",
        "is_first or not is_alike",
        "True",
        f"{_ENGINE}/test_tensor_axis.py::test_norms_count_what_is_split_over_all_ranks_and_what_is_alike_once",
    ),
    Bug(
        "a norm of one place of a pipe",
        "parallel/pipe.py",
        """[list(comm.mesh.along("pipe"))]""",
        "[[comm.mesh.rank]]",
        f"{_PIPE}::test_places_of_one_rank_and_axes_in_another_order",
    ),
    Bug(
        "a parameter at two places counts twice",
        "parallel/pipe.py",
        "if slot.name not in elsewhere]",
        "if slot.name not in ()]",
        f"{_PIPE}::test_a_parameter_at_two_places_counts_once",
    ),
    Bug(
        "an overflow at one place of a pipe is not told to the others",
        "core/order.py",
        "least = self.votes.span(place, min(told.least, 0))",
        "least = min(told.least, self.votes.span(place))",
        f"{_PIPE}::test_what_is_not_finite_at_one_place_skips_the_step_of_all",
    ),
    Bug(
        "momentum of Lion is weighted as it decays",
        "optim/lion.py",
        "add_(grad, alpha=1 - ahead)",
        "add_(grad, alpha=1 - kept)",
        "tests/optim/test_alone.py::test_lion_is_its_paper",
    ),
    Bug(
        "a code's border is the next code",
        "optim/blocks8.py",
        "borders = (values[1:] + values[:-1]) / 2",
        "borders = values[1:]",
        "tests/optim/test_blocks8.py::test_an_element_is_off_by_at_most_half_a_step",
    ),
    Bug(
        "inputs of reduced blocks stay",
        "report/walk.py",
        "            kept.remove(unit)",
        "            pass",
        "tests/report/test_walk.py::test_kept_inputs_agree_with_the_bytes_that_were_measured",
    ),
    Bug(
        "the walk forgets what was reduced before",
        "report/walk.py",
        "reduced.append(unit)",
        "reduced[:] = [unit]",
        "tests/report/test_walk.py::test_states_agree_with_the_bytes_that_were_measured",
    ),
    Bug(
        "all steps read the same windows",
        "train/data.py",
        "default_rng([seed, step])",
        "default_rng([seed])",
        "tests/train/test_data.py::test_batch_is_a_function_of_seed_and_step",
    ),
    Bug(
        "ranks draw windows of their own",
        "train/data.py",
        "size=batch)[first:last]",
        "size=batch)[: last - first]",
        "tests/train/test_data.py::test_global_batch_does_not_depend_on_the_rank_count",
    ),
    Bug(
        "errors of predictions cancel",
        "evidence/scorecard.py",
        "append(abs(one.error))",
        "append(one.error)",
        "tests/plan/test_scorecard.py::test_sums_are_of_absolute_errors",
    ),
    Bug(
        "runs that crashed count as runs that fit",
        "evidence/scorecard.py",
        "[one.fits == one.ran for one in self.labels if one.ran == ran]",
        "[one.fits == one.ran for one in self.labels]",
        "tests/plan/test_scorecard.py::test_accuracy_is_the_mean_of_both_classes",
    ),
    Bug(
        "the highest of equal blocks is taken",
        "plan/machine/memory_blocks.py",
        "        insort(self.free, (block.size, block.address, block))",
        "        insort(self.free, (block.size, -block.address, block))",
        "tests/plan/test_allocator.py::test_among_equals_the_lowest_address_is_taken",
    ),
    Bug(
        "a freed block joins no left neighbour",
        "plan/machine/memory_blocks.py",
        "left.is_free:",
        "left is None:",
        "tests/plan/test_allocator.py::test_free_neighbours_join",
    ),
    Bug(
        "torch's errors of device memory are not recognised",
        "account/exhaustion.py",
        "(MemoryError, torch.OutOfMemoryError)",
        "MemoryError",
        "tests/faults/test_memory.py::test_all_ranks_end_with_the_cause_and_the_memory_by_column",
    ),
    Bug(
        "a parameter as large as a block stays in the root",
        "describe/blocks.py",
        "return min(median(block_bytes), APART_BYTES)",
        "return max(median(block_bytes), APART_BYTES)",
        "tests/describe/test_blocks.py::test_a_large_parameter_outside_blocks_leaves_the_root",
    ),
    Bug(
        "a block that is large stays one unit",
        "describe/blocks.py",
        "        if self.is_large(self.nbytes[block]):\n            return True",
        "        if False:\n            return True",
        "tests/describe/test_blocks.py::test_no_unit_is_large",
    ),
    Bug(
        "gradients are held in the dtype of parameters",
        "describe/precision.py",
        "grad = self.grad or torch.promote_types(param, least)",
        "grad = self.grad or param",
        "tests/plan/test_planning.py::test_precisions_are_those_of_shard",
    ),
    Bug(
        "a module that nothing initializes is passed over",
        "values/materialize.py",
        "if tensor.is_meta and not is_loaded and initializers[module] is None:",
        "if False:",
        "tests/state/test_meta.py::test_what_has_no_values_is_named_on_every_rank",
    ),
    Bug(
        "parameters that are ignored get new values",
        "values/materialize.py",
        "parameter.detach().copy_(values)",
        "None",
        "tests/engine/test_ignored.py::test_ignored_parameters_with_values_keep_them_where_others_have_none",
    ),
    Bug(
        "an average weighs the parameters by its decay",
        "whole/average.py",
        "foreach_lerp_(averages, masters, 1.0 - self.decay)",
        "foreach_lerp_(averages, masters, self.decay)",
        "tests/state/test_average.py::test_the_average_is_that_of_one_process",
    ),
    Bug(
        "hooks of models that are gone stay",
        "watch/last_words.py",
        "        if not self.told and sys.excepthook is self:",
        "        if False:",
        "tests/faults/test_hooks.py::test_hooks_are_installed_once_and_undone_with_the_last_handle",
    ),
    Bug(
        "two ranks may share a device",
        "join/places.py",
        "    if owner == rank:",
        "    if owner is not None:",
        "tests/state/test_places.py::test_devices_that_will_not_do_are_refused_on_all_ranks",
    ),
    Bug(
        "only the rank of a bad device raises",
        "join/places.py",
        "    if theirs:",
        "    if False:",
        "tests/state/test_places.py::test_devices_that_will_not_do_are_refused_on_all_ranks",
    ),
    Bug(
        "a sum begins with the second rank",
        "wire/codec.py",
        "for other in others[:-1]:",
        "for other in others[1:-1]:",
        "tests/wire/test_conformance.py::test_a_transport_does_what_the_engine_asks_for[3-1-messages]",
    ),
    Bug(
        "weights of embeddings decay",
        "train/optimizers.py",
        '{"params": list(language.undecayed()), "weight_decay": 0.0}',
        '{"params": list(language.undecayed()), "weight_decay": settings.weight_decay}',
        "tests/train/test_optimizers.py::test_groups_and_rates_follow_the_optimizer",
    ),
    Bug(
        "a printed number need not agree",
        "evidence/paper_sizes.py",
        "<= 0.006",
        "<= 0.6",
        "tests/plan/test_paper_sizes.py::test_a_wrong_cell_is_found",
    ),
    Bug(
        "a backward's peak is that of the forward",
        "plan/shape/tape.py",
        "return most_bytes(self.backward)[1]",
        "return most_bytes(self.forward)[1]",
        "tests/plan/test_tape.py::test_the_peak_of_a_backward_is_near_that_of_a_trace",
    ),
    Bug(
        "a state of four bytes counts two",
        "checkpoint/ranges.py",
        '"F32": 4',
        '"F32": 2',
        "tests/checkpoint/test_durability.py::test_a_commit_is_on_the_disk_when_save_returns",
    ),
    Bug(
        "states of elements are counted twice",
        "account/accounting.py",
        'add_bytes(found, "states", cell, (value.nbytes, 0))',
        'add_bytes(found, "states", cell, (2 * value.nbytes, 0))',
        "tests/engine/test_memory.py::test_resident_bytes_are_exact_on_each_rank[0-2]",
    ),
    Bug(
        "parameters begin anywhere",
        "table/layout.py",
        "(_round_up(numel, align) for numel in numels)",
        "numels",
        "tests/table/test_layout.py::test_a_known_layout",
    ),
    Bug(
        "what ranks have to do already is not counted",
        "table/owners.py",
        "loads = loads or [0.0] * ranks",
        "loads = [0.0] * ranks",
        "tests/table/test_owners.py::test_matrices_that_come_later_go_where_there_is_less_to_do",
    ),
    Bug(
        "no root is taken of the sum of powers of a norm",
        "core/norms.py",
        "return total if p == 0 else total ** (1 / p)",
        "return total",
        "tests/engine/test_clipping.py::test_clip_grad_norm_and_grad_norm_are_exact[2-2.0]",
    ),
    Bug(
        "the step before predicts a step that is complete",
        "core/history.py",
        "done = self._done if self._has_stepped else self._last_step",
        "done = self._last_step",
        "tests/engine/test_trace.py::test_the_prediction_follows_a_change_of_plan[3]",
    ),
    Bug(
        "a user's choice of kernels is overruled",
        "update/kernels.py",
        'group["fused"] is not None or group["foreach"] is not None or',
        'group["fused"] is not None or',
        "tests/engine/test_guard.py::test_fused_kernels_are_chosen_where_the_user_left_that_open",
    ),
    Bug(
        "an optimizer is tried on a whole matrix alone",
        "optim/admission.py",
        "(_try(optimizer, kind, shape, one) for one in ((), cuts))",
        "(_try(optimizer, kind, shape, one) for one in ((), ()))",
        "tests/engine/test_refused.py::test_refused_by_shard[not element-wise]",
    ),
    Bug(
        "a zero loses its sign",
        "activations/compress_codes.py",
        "return flat.view(_INTEGERS[flat.element_size()]).bool()",
        "return flat.bool()",
        "tests/activations/test_compress_codes.py::test_nonzero_values_come_back",
    ),
    Bug(
        "of several views of a storage the last one's end counts",
        "activations/spans.py",
        "max(span.high, high)",
        "high",
        "tests/activations/test_offload.py::test_views_of_one_storage_move_once",
    ),
    Bug(
        "what lies beside values in a block of a file is lost",
        "store/disk.py",
        "if not writes or skip or (skip + count) % BLOCK_BYTES:",
        "if not writes:",
        "tests/store/test_stored.py::test_what_lies_beside_what_is_written_stays",
    ),
    Bug(
        "values go to the first place of a file",
        "store/stored.py",
        "first.array.write(first.start, values",
        "first.array.write(0, values",
        "tests/store/test_stored.py::test_a_part_of_a_part_is_read_and_written_in_its_place",
    ),
    Bug(
        "model states may take nine tenths of a device",
        "setup/automatic.py",
        "STATES_PART: Final = 0.5",
        "STATES_PART: Final = 0.9",
        "tests/state/test_automatic_offload.py::test_only_what_does_not_fit_is_moved",
    ),
    Bug(
        "ranks may have other rates of learning",
        "setup/equal.py",
        "{type(optimizer).__name__}, {entries}, {options_text(group)}",
        "{type(optimizer).__name__}, {entries}",
        "tests/engine/test_refused.py::test_ranks_that_differ_are_told_how[learning rate]",
    ),
    Bug(
        "ranks along several axes are not in order",
        "wire/mesh.py",
        "list(range(-len(last), 0))",
        "list(range(-len(last), 0))[::-1]",
        "tests/wire/test_mesh.py::test_the_last_axis_is_over_neighbouring_ranks_and_ranks_along_axes_are_in_order",
    ),
    Bug(
        "a forked child tells its error to the ranks",
        "watch/last_words.py",
        "for status in self.told if not is_child_of(status.process)]",
        "for status in self.told]",
        "tests/faults/test_hooks.py::test_an_error_is_told_by_the_process_of_a_model_and_by_no_child",
    ),
    Bug(
        "shards of replicas are not compared",
        "whole/copies.py",
        "            if has_replicas and not is_whole:",
        "            if False:",
        "tests/state/test_copies.py::test_one_bit_on_one_rank_is_found[3-shard-options5-the shard of blocks.1]",
    ),
    Bug(
        "other data on one tensor rank is not seen",
        "parallel/alike.py",
        "elif _first_other(rows[1]) is not None:",
        "elif False:",
        f"{_ALIKE}::test_other_values_on_one_rank_are_an_error_of_all_ranks_in_that_step[float]",
    ),
    Bug(
        "split halves get equal masks",
        "parallel/streams.py",
        'f"{number} {self._place}"',
        'f"{number}"',
        f"{_ALIKE}::test_masks_of_split_activations_differ_and_those_of_whole_ones_are_alike[False]",
    ),
    Bug(
        "compiled code may draw equal masks for split halves",
        "parallel/streams.py",
        "elif draws > self._before:",
        "elif draws < self._before:",
        f"{_ENGINE}/test_tensor_axis.py::test_compiled_code_with_split_parameters_draws_no_random_numbers",
    ),
    Bug(
        "a callable around the model is not taken for compiled code",
        "torch_private.py",
        'type(one).__name__ == "OptimizeContext"',
        'type(one).__name__ == "OptimizedContext"',
        f"{_ENGINE}/test_tensor_axis.py::test_compiled_code_with_split_parameters_draws_no_random_numbers",
    ),
    Bug(
        "torch cannot compile another shape while gradients are held",
        "core/gradient.py",
        "return view if is_plain or not is_read_for_tracing() else None",
        "return view",
        "tests/engine/test_compile.py::test_gradients_are_held_while_torch_compiles_for_another_shape",
    ),
    Bug(
        "pinned memory is used again while a copy is under way",
        "devices.py",
        "(done if all(mark.query() for mark in one[1]) else self._unused)",
        "done",
        "tests/store/test_pinned.py::test_memory_is_used_again_once_nothing_refers_to_it_and_copies_are_over",
    ),
    Bug(
        "compiled code takes a distributed gradient for None",
        "torch_private.py",
        'if frame is None or frame.f_code.co_name != "safe_grad":',
        'reader = frame\n    while reader is not None and "_dynamo" not in reader.f_code.co_filename:\n        '
        "reader = reader.f_back\n    if reader is not None:\n        return True\n    "
        'if frame is None or frame.f_code.co_name != "safe_grad":',
        "tests/engine/test_compile.py::test_compiled_code_that_reads_a_distributed_gradient_raises",
    ),
    Bug(
        "hooks of saved tensors stay after an interrupted forward",
        "activations/saved.py",
        "while self._to_pop and graph_task() == -1 and",
        "while self._to_pop and",
        "tests/faults/test_interrupt.py::test_the_loss_before_has_its_backward[compress]",
    ),
    Bug(
        "whole activations draw from the stream of a single rank",
        "parallel/streams.py",
        "        self.generator.set_state(self._common.pop(seed))",
        "        self._common.pop(seed)",
        f"{_ALIKE}::test_masks_of_split_activations_differ_and_those_of_whole_ones_are_alike[False]",
    ),
    Bug(
        "copies along tensor are not compared",
        "whole/copies.py",
        '["tensor"] * slot.form.is_alike',
        '["tensor"] * False',
        "tests/state/test_copies_along_tensor.py::test_what_ranks_along_tensor_have_alike_is_compared[True]",
    ),
    Bug(
        "a key may be twice in JSON",
        "checkpoint/strict.py",
        "if len(value) != len(pairs):",
        "if False:",
        "tests/checkpoint/test_hostile.py::test_json_is_strict",
    ),
    Bug(
        "a forward's peak counts twice what it keeps",
        "plan/shape/tape.py",
        "return left, most - left",
        "return left, most",
        "tests/plan/test_tape.py::test_what_a_forward_keeps_and_what_is_above_are_its_peak",
    ),
)
"""Planted after the tiers were fixed, in rooms besides the engine: wrong numbers, wrong words, ranks left alone."""

TWO_A_ROOM = (
    Bug(
        "states moved to the host replace what was there in memory()",
        "account/accounting.py",
        'found["host"], found["states"] = found["host"] + found["states"], 0',
        'found["host"], found["states"] = found["states"], 0',
        "tests/engine/test_offload_states.py::test_states_that_are_moved_away_join_what_the_host_has",
    ),
    Bug(
        "the unit that is gathered ahead is not whole in summary()",
        "account/summary.py",
        "*others[:2]",
        "*others[:1]",
        "tests/state/test_summary.py::test_a_model_that_is_mostly_whole_is_warned_about",
    ),
    Bug(
        "what a division by ranks leaves of an input is in no part",
        "activations/partition.py",
        "numel = -(-whole.numel() // self._axis.size)",
        "numel = whole.numel() // self._axis.size",
        "tests/activations/test_partition.py::test_parts_of_any_length_make_the_whole[1025]",
    ),
    Bug(
        "a view that begins before the first view of its storage is cut",
        "activations/spans.py",
        "min(span.low, low)",
        "span.low",
        "tests/activations/test_offload.py::test_a_range_has_all_views_of_its_storage_whichever_comes_first",
    ),
    Bug(
        "diff() counts the last piece of a tensor",
        "checkpoint/diff.py",
        "count += int(",
        "count = int(",
        "tests/checkpoint/test_tools.py::test_differences_of_all_pieces_are_counted",
    ),
    Bug(
        "a power of ten has a digit less",
        "checkpoint/ranges.py",
        'side="right") + 1',
        'side="left") + 1',
        "tests/checkpoint/test_many.py::test_headers_are_as_long_as_planned[10]",
    ),
    Bug(
        "a histogram of equal elements begins at them",
        "core/elements.py",
        "        min, max = min - 1, max + 1",
        "        min, max = min, max + 1",
        "tests/engine/test_elements.py::test_a_histogram_of_equal_elements_has_them_in_the_middle",
    ),
    Bug(
        "a histogram of equal ends is of these ends",
        "core/elements.py",
        "if min == max:  # as",
        "if min == max == 0:  # as",
        "tests/engine/test_elements.py::test_a_histogram_of_equal_elements_has_them_in_the_middle",
    ),
    Bug(
        "a backward of several flights takes back the first",
        "core/flights.py",
        "for flight in self._arrived[1]:",
        "for flight in self._arrived[1][:1]:",
        "tests/engine/test_pipeline_counts.py::test_a_backward_takes_back_all_flights_whose_outputs_it_reached",
    ),
    Bug(
        "mesh= may have the rank behind the last one",
        "describe/axes.py",
        "or not 0 <= rank < launched:",
        "or not 0 <= rank <= launched:",
        "tests/describe/test_asked.py::test_the_rank_behind_the_last_one_is_not_there",
    ),
    Bug(
        "gradients that are to go with their states stay",
        "describe/offload.py",
        "moves |= bool(offload.gradients)",
        "moves |= False",
        "tests/describe/test_asked.py::test_gradients_go_with_their_states_where_a_rank_keeps_no_others_or_asks_for_it",
    ),
    Bug(
        "model parallelism makes no larger model fit",
        "evidence/paper_sizes.py",
        "(state_bytes(name, numel, ranks) / numel) * tensor",
        "(state_bytes(name, numel, ranks) / numel)",
        "tests/plan/test_paper_sizes.py::test_table_2[2]",
    ),
    Bug(
        "micro-batches of a published run count each rank's",
        "evidence/rows.py",
        '_whole(row, "global_batch", batch * data) // (batch * data))',
        '_whole(row, "global_batch", batch * data) // batch)',
        "tests/plan/test_scorecard.py::test_a_batch_of_all_ranks_is_divided_over_them",
    ),
    Bug(
        "DeepSpeed's cosine is a step late",
        "integrations/deepspeed_optimizers.py",
        "(step - warmup + 1) / max(1, total - warmup)",
        "(step - warmup) / max(1, total - warmup)",
        "tests/integrations/test_deepspeed.py::test_schedules_have_deepspeeds_rates",
    ),
    Bug(
        "tensors that begin at one address are copied as one",
        "integrations/parts.py",
        "key = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name",
        "key = value.data_ptr() if value.numel() else name",
        "tests/integrations/test_parts.py::test_copies_share_memory_as_the_tensors_did_and_keep_their_shapes",
    ),
    Bug(
        "an Adafactor parameter of zeros stays at zero",
        "optim/adafactor.py",
        "max(least, size)",
        "size",
        "tests/optim/test_alone.py::test_lamb_and_adafactor_train_parameters_of_zeros",
    ),
    Bug(
        "a LAMB parameter of zeros stays at zero",
        "optim/lamb.py",
        "(norms > 0).all(1)",
        "(norms > 0).any(1)",
        "tests/optim/test_alone.py::test_lamb_and_adafactor_train_parameters_of_zeros",
    ),
    Bug(
        "what rounding lost outlives new anchors",
        "outer/fragments.py",
        "            self.lost.zero_()",
        "            pass",
        "tests/outer/test_exchange.py::test_new_anchors_are_the_parameters_and_nothing_is_owed",
    ),
    Bug(
        "what stands before the first block of a pipe weighs nothing",
        "parallel/cut.py",
        "weights = [sizes[0] + sizes[1], *sizes[2:]]",
        "weights = [sizes[1], *sizes[2:]]",
        "tests/engine/test_pipeline_counts.py::test_what_stands_before_the_first_block_counts_where_a_pipe_is_cut",
    ),
    Bug(
        "the last value of an accumulation that is not finite is named",
        "parallel/finite.py",
        "torch.minimum(self._found, found)",
        "torch.maximum(self._found, found)",
        "tests/faults/test_pipeline_faults.py::test_the_first_value_of_all_steps_of_an_accumulation_is_named",
    ),
    Bug(
        "dense layers of a mixture have experts",
        "plan/shape/shapes.py",
        'config.get("first_k_dense_replace", 0) if experts else 0',
        "0",
        "tests/plan/test_planning.py::test_a_mixture_with_dense_layers_is_read",
    ),
    Bug(
        "a collective of a plan begins before its data is there",
        "plan/step/clock.py",
        "max(self.now_s, self.free_s[lane], not_before_s)",
        "max(self.now_s, self.free_s[lane])",
        "tests/plan/test_film.py::test_a_gather_begins_when_offloaded_parameters_are_there",
    ),
    Bug(
        "a trace begins where the first rank begins",
        "report/profile.py",
        "(one.start_ns for slices in by_rank for one in slices)",
        "(one.start_ns for one in by_rank[0])",
        "tests/report/test_profile.py::test_a_trace_begins_with_the_first_span_of_any_rank",
    ),
    Bug(
        "time after a span counts from its beginning",
        "report/timeline.py",
        "        self._add(label, category, unit, start_ns)\n        self._rest_start_ns = self._last_ns\n",
        "        self._add(label, category, unit, start_ns)\n",
        "tests/report/test_profile.py::test_spans_and_what_is_between_them_fill_the_time_once",
    ),
    Bug(
        "an added parameter is told once",
        "setup/additions.py",
        "self.is_suspected = bool(added)",
        "self.is_suspected = False",
        "tests/engine/test_refused.py::test_what_is_added_is_named_as_long_as_it_is_there",
    ),
    Bug(
        "gradients of inputs are divided before they are cast",
        "setup/casts.py",
        "grad.to(ctx.dtype) / scale",
        "grad / scale",
        "tests/engine/test_precision.py::test_gradients_of_inputs_are_divided_in_the_dtype_of_the_inputs",
    ),
    Bug(
        "copies ahead do not wait for kernels before them",
        "store/ahead.py",
        'devices.lane(self.device, "back", handed_over)',
        'devices.lane(self.device, "back", None)',
        "tests/engine/test_offload_ahead.py::test_a_copy_follows_what_was_queued_when_it_was_handed_over",
    ),
    Bug(
        "a copy back does not wait for the copy out",
        "store/bus.py",
        "        if isinstance(after, _CudaTransfer):",
        "        if False:",
        "tests/activations/test_offload.py::test_streams_wait_for_one_another",
    ),
    Bug(
        "held units are gathered twice a step",
        "table/bytes.py",
        "1 if unit.is_held or unit.number < first else 2",
        "1 if unit.number < first else 2",
        "tests/table/test_spec.py::test_a_held_unit_is_gathered_once_a_step[backward-1]",
    ),
    Bug(
        "a held gradient takes the sum of a replica twice",
        "table/wires.py",
        "is_first and not bucket.holds_whole_gradients",
        "not bucket.holds_whole_gradients",
        "tests/table/test_spec.py::test_the_sum_of_a_replica_is_apart_where_held_gradients_cannot_take_it",
    ),
    Bug(
        "a parameter is a key of an optimizer's states",
        "core/slices.py",
        "if self.is_open or slot is None",
        "if True or slot is None",
        "tests/engine/test_state.py::test_parameters_are_keys_of_states_under_gathered_alone[1]",
    ),
    Bug(
        "what an exception leaves changed is kept",
        "whole/gathered.py",
        "_refuse_torn(engine, model, [changes for changes, versions in seen if changes.tear(versions)])",
        "pass",
        "tests/engine/test_changes.py::test_an_exception_under_gathered_keeps_no_change[1]",
    ),
    Bug(
        "a backward leaves a tied unit at each call",
        "plan/step/script.py",
        """            backward.append(mark("leave", call.unit))
    # The gradient""",
        """        backward.append(mark("leave", call.unit))
    # The gradient""",
        "tests/plan/test_film.py::test_a_tied_embedding_is_gathered_once_a_step_and_reduced_last[gpt2]",
    ),
    Bug(
        "what a forward uses last is given back",
        "table/spec.py",
        "if self.is_last and is_gathered",
        "if False and is_gathered",
        "tests/table/test_step.py::test_the_actions_of_the_passes_by_hand",
    ),
    Bug(
        "a pass that begins with a whole unit gathers two beside it",
        "table/schedule.py",
        "WINDOW - (self._begins_whole and not self._recent)",
        "WINDOW",
        "tests/table/test_step.py::test_a_backward_that_begins_with_the_last_unit_has_no_more_than_two_at_a_time[False]",
    ),
    Bug(
        "a unit that stayed whole does not count in its backward",
        "table/schedule.py",
        "            self.outlasting.discard(unit)  #",
        "            pass  #",
        "tests/table/test_step.py::test_a_backward_that_begins_with_the_last_unit_has_no_more_than_two_at_a_time[True]",
    ),
    Bug(
        "reads between forward and backward see memory that the backward frees",
        "core/order.py",
        "self._units[n].hold() for",
        "n for",
        "tests/engine/test_last_units.py::test_reads_between_forward_and_backward_raise[True]",
    ),
    Bug(
        "the last unit by registration stays wherever it is used",
        "table/schedule.py",
        "held - {last} if is_earlier else held",
        "held",
        "tests/engine/test_last_units.py::test_a_unit_stays_only_if_a_forward_gathers_it_last",
    ),
    Bug(
        "gradients of several micro-batches are added in the dtype of messages",
        "core/grads.py",
        "self.message if is_sent and self._scale == 1.0 else self.dtype",
        "self.message",
        "tests/engine/test_landing_as_message.py::test_sums_are_those_of_messages_in_bf16"
        "[3-two micro-batches, one sum]",
    ),
    Bug(
        "a rank scales what it converts where others scale the sum",
        "wire/nccl.py",
        "(op, rest), factor = _folded(scale, ranks, codec.dtype), 1.0",
        "op, rest, factor = dist.ReduceOp.SUM, 1.0, scale",
        "tests/engine/test_landing_as_message.py::test_ranks_whose_gradients_land_differently_have_one_sum"
        "[2-another order-False]",
    ),
    Bug(
        "a late gradient is added in the dtype of messages",
        "core/grads.py",
        "            self._widen()",
        "            pass",
        "tests/engine/test_landing_as_message.py::test_a_gradient_that_comes_later_is_added_in_fp32",
    ),
    Bug(
        "messages of a pipe take no time",
        "table/pipeline.py",
        "max(start_s, *(ends[one] + message_s for",
        "max(start_s, *(ends[one] for",
        "tests/table/test_pipeline.py::test_messages_take_their_time_between_places",
    ),
    Bug(
        "the record of the last checkpoint is removed",
        "train/metrics.py",
        "made > step:",
        "made >= step:",
        "tests/train/test_resume.py::test_records_up_to_a_checkpoint_stay",
    ),
    Bug(
        "a new learning rate is that of all groups",
        "train/resume.py",
        "[rate * scale for rate",
        "[now.learning_rate for rate",
        "tests/train/test_resume.py::test_both_rates_of_muon_follow_another_rate",
    ),
    Bug(
        "an update in the background follows a learning rate that is a tensor",
        "update/background.py",
        "value.clone() if isinstance(value, Tensor) else value for key",
        "value for key",
        "tests/engine/test_offload_background.py::test_rates_that_change_afterwards_count_from_the_next_step_on",
    ),
    Bug(
        "a model whose buffers alone are on the meta device has values",
        "values/materialize.py",
        "[*model.parameters(), *model.buffers()])",
        "[*model.parameters()])",
        "tests/state/test_meta.py::test_buffers_alone_may_be_on_the_meta_device",
    ),
    Bug(
        "a last row that is a piece of its own is not read",
        "values/weights.py",
        "range(0, source.shape[0], rows):",
        "range(0, source.shape[0] - 1, rows):",
        "tests/state/test_meta.py::test_the_last_piece_of_a_file_may_have_one_row",
    ),
    Bug(
        "a page is written where it is read",
        "watch/pages.py",
        "half = 1 - page[0]",
        "half = page[0]",
        "tests/engine/test_watchdog.py::test_a_text_that_is_being_read_is_not_overwritten",
    ),
    Bug(
        "a rank that was slow is told again at each change",
        "watch/paces.py",
        "(EASED if rank in before else SLOW)",
        "SLOW",
        "tests/faults/test_slow.py::test_what_counts_as_slow",
    ),
    Bug(
        "a rank that takes a mean is said to compute",
        "wire/comm.py",
        'with waits_outside("gather_across_ranks"):',
        "if True:",
        "tests/faults/test_one_evaluates.py::test_each_rank_learns_where_the_others_are",
    ),
    Bug(
        "loaded states of rounded parameters stay rounded",
        "whole/gathered.py",
        "and parameter.dtype != dtype:",
        "and parameter.dtype == dtype:",
        "tests/state/test_whole_values.py::test_states_of_rounded_parameters_are_loaded_unrounded",
    ),
    Bug(
        "whole states lose the strides of their parameter",
        "whole/owned.py",
        "if is_alike else values.clone()",
        "if not is_alike else values.clone()",
        "tests/state/test_whole_values.py::test_whole_states_have_the_strides_of_their_parameter",
    ),
    Bug(
        "votes of three ranks reach two",
        "wire/linked.py",
        "hops = (size - 1).bit_length()",
        "hops = size.bit_length() - 1",
        "tests/wire/test_votes.py::test_each_rank_learns_the_least_of_all[3]",
    ),
    Bug(
        "a loader resumes at the batch of one rank",
        "loader.py",
        "// (size * ranks)",
        "// size",
        "tests/checkpoint/test_options.py::test_other_ranks_share_what_all_have_read[1-2-3]",
    ),
    Bug(
        "a loader draws its epochs from one seed",
        "loader.py",
        "sampler.set_epoch(_Epoch(self.epoch))",
        "sampler.set_epoch(0)",
        "tests/checkpoint/test_options.py::test_each_epoch_has_its_own_order",
    ),
    Bug(
        "attributes of tuples are lost",
        "tree.py",
        "        vars(made).update(vars(value))",
        "        pass",
        "tests/engine/test_tree.py::test_each_container_is_of_its_class_afterwards",
    ),
)
"""Invented by reading the package alone, two a room, and planted to see which of them the first tier finds."""

_EVENTS = "tests/plan/test_events_equal.py"
PLAN = (
    Bug(
        "a plan's gathers are not hoisted",
        "table/step.py",
        "hoist(requests) if record is None",
        "tuple(requests) if record is None",
        f"{_EVENTS}::test_one_run_of_make_train_is_as_planned[3]",
    ),
    Bug(
        "a film plays the actions of a pass without reductions",
        "plan/step/simulate.py",
        "told.uses, is_reduced=is_reduced,",
        "told.uses, is_reduced=False,",
        f"{_EVENTS}::test_one_run_of_make_train_is_as_planned[2]",
    ),
    Bug(
        "a film updates the buckets without gradients",
        "plan/step/updating.py",
        "            if number in used:",
        "            if True:",
        f"{_EVENTS}::test_the_plan_is_the_trace_however_units_are_used[a block that is skipped-3]",
    ),
    Bug(
        "a film adds to gradients of the host without a copy in",
        "plan/step/elsewhere.py",
        'clock.move("copy in", bucket.unit, nbytes, "gradients from the host")',
        "pass",
        f"{_EVENTS}::test_the_plan_is_the_trace_of_copies_between_a_device_and_other_memories[host-4]",
    ),
    Bug(
        "a film's updates in files write no parameters",
        "plan/step/elsewhere.py",
        '("write", [*updated, written_bytes(bucket)])',
        '("write", updated)',
        f"{_EVENTS}::test_the_plan_is_the_trace_of_copies_between_a_device_and_other_memories[a part in a file-1]",
    ),
    Bug(
        "a film's replicas send twice as much",
        "plan/step/landing.py",
        "shard_bytes = bucket.layout.shard_numel * itemsize",
        "shard_bytes = 2 * bucket.layout.shard_numel * itemsize",
        f"{_EVENTS}::test_the_plan_is_the_trace_of_replicas[2-True]",
    ),
    Bug(
        "a film waits for each published unit before it sends the next one",
        "plan/step/updating.py",
        "            pending.append((unit, _publish",
        '            clock.note("wait", unit.name)\n            pending.append((unit, _publish',
        f"{_EVENTS}::test_one_run_of_make_train_is_as_planned[2]",
    ),
)
"""The steady step of a plan, other than the engine's."""

_EXCHANGE = "tests/outer/test_mailbox_exchange.py"
_REFUSALS = "tests/outer/test_mailbox_refusals.py"
MAILBOX = (
    Bug(
        "a stale version taken",
        "outer/island_source.py",
        "min(look.needed.values()) >= bound",
        "min(look.needed.values()) >= bound - 1",
        f"{_EXCHANGE}::test_an_island_waits_at_exactly_the_staleness[2]",
    ),
    Bug(
        "a change counted twice",
        "outer/island_exchange.py",
        "if self._pending is not None and own in due:\n            values -=",
        "if self._pending is not None and own is None:\n            values -=",
        f"{_EXCHANGE}::test_islands_that_wait_have_the_bits_of_a_mean_in_their_order",
    ),
    Bug(
        "an island that waits takes the next change of a faster one",
        "outer/island_source.py",
        "here={name: min(last, version) for name, last in found.here.items()})\n\n    def drain",
        "here={name: last for name, last in found.here.items()})\n\n    def drain",
        f"{_EXCHANGE}::test_an_island_that_waits_leaves_the_next_change_of_a_faster_one",
    ),
    Bug(
        "an island that waits leaves what one has put before it left",
        "outer/island_source.py",
        "has_all = self._options.staleness != 0 or",
        "has_all = True or",
        f"{_EXCHANGE}::test_an_island_that_waits_takes_what_one_has_put_before_it_left",
    ),
    Bug(
        "an island that is a launch forgets what rounding lost",
        "outer/island_exchange.py",
        "            lost = change - told\n",
        "            lost = change - change\n",
        "tests/outer/test_mailbox_bits.py::test_islands_that_wait_have_the_bits_of_the_formula",
    ),
    Bug(
        "islands add in the order of names as texts",
        "outer/mailbox_order.py",
        "return len(name), name",
        "return 0, name",
        f"{_EXCHANGE}::test_islands_that_wait_have_the_bits_of_a_mean_in_their_order",
    ),
    Bug(
        "an island that comes back keeps what was counted",
        "outer/island_exchange.py",
        "self._pending.version <= start.last",
        "self._pending.version < start.last",
        f"{_EXCHANGE}::test_a_change_that_was_acknowledged_before_an_island_joins_again_is_counted_once",
    ),
    Bug(
        "an old version replaces one that was acknowledged",
        "outer/mailbox_book.py",
        "if version != (due := self.next_version(member)):",
        "if version > (due := self.next_version(member)):",
        f"{_REFUSALS}::test_an_old_version_is_refused",
    ),
    Bug(
        "a change is acknowledged before it is on the disk",
        "outer/mailbox_files.py",
        "            os.fsync(self._file)\n",
        "            pass\n",
        f"{_REFUSALS}::test_what_is_acknowledged_was_flushed",
    ),
    Bug(
        "a frame's number is not authenticated",
        "outer/mailbox_wire.py",
        "hmac.new(key, _LENGTH.pack(number),",
        "hmac.new(key, _LENGTH.pack(0),",
        f"{_REFUSALS}::test_a_changed_or_repeated_frame_is_refused",
    ),
    Bug(
        "a length is not compared with the limit",
        "outer/mailbox_wire.py",
        "<= length <= MAX_FRAME_BYTES",
        "<= length",
        f"{_REFUSALS}::test_a_length_beyond_the_limit_is_not_allocated",
    ),
)
"""The mailbox of islands, and the islands."""

BUGS = (*CHECKPOINT, *ENGINE, *MAILBOX, *PLAN, *ROOMS, *TWO_A_ROOM)


def plant(bug: Bug, folder: Path) -> None:
    """Put a bug into a copy of the package.

    Raises:
        ValueError: the code has changed, and the bug has no place, or several.
    """
    if text := misplaced(bug, folder):
        raise ValueError(text)
    path = folder / "zeroshard" / bug.file
    path.write_text(path.read_text().replace(bug.right, bug.wrong))


def misplaced(bug: Bug, folder: Path) -> str:
    """Return the error for a bug that has no place in a copy of the package, or several; else nothing."""
    path = folder / "zeroshard" / bug.file
    count = path.read_text().count(bug.right) if path.exists() else 0
    if count == 1:
        return ""
    package = ROOT / "zeroshard"
    others = [str(p.relative_to(package)) for p in sorted(package.rglob("*.py")) if bug.right in p.read_text()]
    now = f"; {', '.join(others)} has this text" if others and bug.file not in others else ""
    return f"{bug.name}: {bug.right.strip()!r} is {count} times in {bug.file}, expected 1{now}"


def main() -> None:
    """Run the tests without a bug, then with one after the other; print and write what came of it."""
    parser = argparse.ArgumentParser(description="Plant bugs, and see whether the tests find them.")
    parser.add_argument("--only", default="", help="bugs with this text in their name or file")
    parser.add_argument(
        "--rotation", default="all", help="as of pytest: a number, or common: a share of the cases that rotate"
    )
    parser.add_argument("--output", type=Path, help="a file for what came of it, as JSON")
    arguments = parser.parse_args()
    bugs = [bug for bug in BUGS if arguments.only in bug.name or arguments.only in bug.file]
    if not bugs:
        parser.error(f"--only: no bug has {arguments.only!r} in its name or file")
    if gone := [text for bug in bugs if (text := misplaced(bug, ROOT))]:
        sys.exit("\n".join(gone))
    rotation = arguments.rotation
    with tempfile.TemporaryDirectory(prefix="zeroshard-planted-") as name:
        tests, options = sorted({bug.test for bug in bugs}), ("--rotation", rotation)
        status = run_tests(copy_to(Path(name, "right")), tests, LIMIT_S * len(tests), *options, is_shown=True)
        if status != PASSED:
            sys.exit(f"without a bug the tests end with status {status}")
        found = {bug.name: look_for(bug, Path(name), *options) for bug in bugs}
    missed = [name for name, one in found.items() if not one["is_found"]]
    print(f"{len(found) - len(missed)} of {len(found)} planted bugs were found")
    if arguments.output:
        write_result(arguments.output, circumstances("tools.planted") | {"rotation": rotation, "bugs": found})
    sys.exit(1 if missed else 0)


def look_for(bug: Bug, folder: Path, *options: str) -> dict[str, str | bool | float]:
    """Run a bug's test with it; tell whether it fails, and after how many seconds."""
    copy, begin_s = copy_to(folder / "wrong"), time.monotonic()
    plant(bug, copy)
    is_found, took_s = run_tests(copy, [bug.test], LIMIT_S, *options) == FAILED, time.monotonic() - begin_s
    shutil.rmtree(copy)
    print(f"{'found ' if is_found else 'MISSED'}  {took_s:4.0f} s  {bug.name}  ({bug.test})", flush=True)
    return {"test": bug.test, "is_found": is_found, "seconds": round(took_s, 1)}


def copy_to(folder: Path) -> Path:
    """Copy what the tests need."""
    folder.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def run_tests(folder: Path, tests: Sequence[str], limit_s: float, *options: str, is_shown: bool = False) -> int:
    """Run tests of a copy and return pytest's exit status, or `STOPPED`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    output = None if is_shown else subprocess.DEVNULL
    try:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return STOPPED
    return done.returncode


if __name__ == "__main__":
    main()
