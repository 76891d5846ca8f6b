"""``train.py`` whose host reads outcomes two steps later also on a CPU; run by test_train_ahead.py."""

import train
from clipkit import distributed
from clipkit.errors import run_command
from clipkit.options import parse_arguments
from clipkit.training import guards

if __name__ == "__main__":
    guards.LAG["cpu"] = 2
    arguments = parse_arguments()
    run_command(distributed.together(lambda: train.main(arguments)))
