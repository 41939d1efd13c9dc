"""A part of the launcher's store that only the ranks of this start have written to.

Owns how ranks of one start find each other among keys of earlier starts. It must not know what the store is used for.

Note: why
    torchrun restarts ranks (`--max-restarts`) and keeps its store, with the keys of ranks that have ended: torch 2.13
    does not separate starts, so that gloo may connect to the address of a process that is gone. The number of restarts
    in the environment cannot separate them: each launcher counts the failures of its own ranks, so the number may
    differ between hosts. Therefore each rank shows a word that it has just drawn, and rank 0 answers with the name of
    the part. Only an answer that repeats the rank's word is of this start. Ranks of an earlier start cannot answer,
    because launchers end all ranks before they restart any.
"""

import uuid

from torch.distributed import PrefixStore, Store

from zeroshard.join.arrival import Wait, explained

__all__ = ["part_of_this_start"]


def part_of_this_start(store: Store, wait: Wait) -> Store:
    """Return a part of the store, the same on all ranks of this start, without keys of an earlier one.

    Args:
        wait: the wait of this rank. Rank 0 answers whenever it pauses, so it must wait for all ranks next.

    Raises:
        RuntimeError: rank 0 has not come within the limit, or the store has ended.

    Collective: some requests to the store, on rank 0 for each rank; every rank must call.
    """
    name, rank = uuid.uuid4().hex, wait.rank
    with explained(wait):
        if rank:
            store.set(f"zeroshard/word of {rank}", word := name)
            while not (answer := _read(store, f"zeroshard/answer to {rank}")).startswith(word):
                wait.pause([0])
            name = answer.removeprefix(word)
            store.set(f"zeroshard/word of {rank}", name)
        else:
            late = [*wait.ranks[1:]]

            def answer_words() -> None:
                late[:] = [other for other in late if not _has_name(store, other, name)]

            wait.meanwhile = answer_words
            answer_words()
    return PrefixStore(f"zeroshard/start {name}", store)


def _has_name(store: Store, rank: int, name: str) -> bool:
    """Return whether a rank shows the name of the part; answer the word that it shows otherwise."""
    word = _read(store, f"zeroshard/word of {rank}")
    if word not in ("", name):
        store.set(f"zeroshard/answer to {rank}", f"{word}{name}")
    return word == name


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
