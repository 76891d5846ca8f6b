"""What each rank has after it was given the chief's bytes; ``test_distributed`` starts it as two ranks."""

import hashlib
import sys
from pathlib import Path

from clipkit import distributed

CONTENTS = (b"x", bytes(range(256)) * 5000 + b"end", b"\0" * 7)

if __name__ == "__main__":
    distributed.start()
    rank = distributed.rank()
    found = [distributed.bytes_of_chief(content if rank == 0 else b"other") for content in CONTENTS]
    digests = [hashlib.sha256(content).hexdigest() for content in found]
    (Path(sys.argv[1]) / str(rank)).write_text("\n".join(digests))
    distributed.stop()
