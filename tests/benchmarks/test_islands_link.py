"""The tables of islands over a cable: ratios of bytes, and seconds over bytes by rate."""

from typing import Any

from benchmarks.islands_link import RATE, table_of


def counted(sent: int) -> dict[str, Any]:
    """Return what is counted of a mode, which sends so many bytes in two exchanges."""
    return {"in": sent, "cable in": sent + 100, "between": 0, "cable between": 50, "between_s": 10.0, "steps": 20}


def test_bytes_are_told_as_a_part_of_those_of_gradients() -> None:
    text = table_of({"bytes": {"replicas=2": counted(40_000_000), "8 bits": counted(1_000_000)}})
    assert "| over 20 steps |" in text
    assert "| every 10, 8 bits | 1.0 | 1 / 40.00 | 1.0 |" in text
    assert "0 bytes by the transport, and 5 a second by the cable" in text


def test_an_exchange_is_compared_with_its_bytes_over_the_rate() -> None:
    link = {"between_s": [0.2], "between_free_s": [0.1], "exchange_s": [2.4], "exchange_free_s": [0.3]}
    result = {"bytes": {"replicas=2": counted(10)}, "link": link | {"cable_bytes_a_direction": 2 * RATE / 8}}
    result["overlap"] = {"slow_s": [5.0], "free_s": [4.0], "cable_bytes_a_direction": 4 * RATE / 8}
    result["bytes"]["4 bits"] = counted(5)
    text = table_of(result)
    assert "2.00 of one without the limit, an exchange 2.20 s, 1.10 of bytes over rate, and 1.05 less" in text.replace(
        "\n", " "
    )
    assert "25% of the transfer is exposed" in text
