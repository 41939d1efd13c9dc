"""Random programs against an oracle: models and training loops drawn from a seed, run by zeroshard and by one process.

Owns nothing by itself. `draw` makes a program as data, `write` turns the data into Python, `job` says what the program
means (on ranks, and in one process in fp64), `ranks` runs many on ranks and judges them, `shrink` makes a failing one
smaller. `python -m tools.programs --help` is the way in.
"""
