"""What all tests share."""

import torch

# models of this size gain nothing from threads, which wait for each other on a busy machine
torch.set_num_threads(1)
