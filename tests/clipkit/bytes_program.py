"""Program run as two ranks by ``test_distributed``: writes a digest of the bytes received from rank 0.

Starts with a low limit of open files, which must not be that of many ranks.
"""

import hashlib
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from clipkit import distributed

CONTENTS = (b"x", bytes(range(256)) * 5000 + b"end", b"", b"\0" * 7)

if __name__ == "__main__":
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, most_files))
    distributed.start()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most_files, most_files)
    rank = distributed.rank()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    if rank == 0:
        time.sleep(5)  # as if counting shards; with torch's timeout alone the other rank fails
    found = [distributed.broadcast_bytes(content if rank == 0 else b"other") for content in CONTENTS]
    digests = [hashlib.sha256(content).hexdigest() for content in found]
    (Path(sys.argv[1]) / str(rank)).write_text("\n".join(digests))
    distributed.stop()
