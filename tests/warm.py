"""What ranks would do alike before they begin, done once: the fork server of tests imports this module.

Owns the imports of ranks and their first steps. Must not start threads or processes: ranks are forked from here.

Note: what is done here
    A rank imports what the server has not, and tests the private names of torch, once a process. Twenty milliseconds
    of each rank are a minute of `make test`. `engine/test_torch_private.py` runs those tests as in a new process.
"""

import torch
import torch._dynamo
import torch.distributed.tensor.parallel
import torch.profiler

import tests.models
import tests.oracle  # noqa: F401
import zeroshard.parallel.tensor
import zeroshard.sharding
import zeroshard.testing
import zeroshard.train.loop
import zeroshard.train.planned  # noqa: F401
from zeroshard import torch_checks

torch.set_num_threads(1)
torch_checks.check_torch()
