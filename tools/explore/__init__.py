"""The order protocol, explored: `core/order.py` itself, driven on simulated ranks.

Read `program.py` for what programs are, `world.py` for what is simulated, `run.py` for what must hold.
"""
