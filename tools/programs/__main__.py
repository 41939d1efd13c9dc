"""Run random programs and count what came of them.

python -m tools.programs --count 20000 --ranks 2 --seed 1
python -m tools.programs --replay 17 --ranks 2
python -m tools.programs --pairs --count 2000
python -m tools.programs --faults --count 10000
python -m tools.programs --offload --count 1000
python -m tools.programs --wide --count 10000
"""

from .cli import main

main()
