"""What all tests share."""

import signal

import torch

# models of this size gain nothing from threads, which wait for each other on a busy machine
torch.set_num_threads(1)

# what was started in the background, or by nohup, ignores these, and so would all that the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
