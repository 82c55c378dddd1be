"""Where there is no GPU, Triton kernels run under Triton's interpreter.

Triton decides when it is first imported, and transformers imports it: the variable must be set before any test module.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
