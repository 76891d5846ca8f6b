"""Read every sample of the given shards, each shard in a process of its own, and print the results.

Prints one line of JSON per shard: CPU time in seconds, growth of memory in MiB, and keys and images of the
samples, or the error.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from clipkit.errors import DataError
from clipkit.samples.remote.store import ShardFile
from data.shards.samples import Shards

_SECONDS = 30
_MOST = 1000  # maximum number of samples to read


def resident() -> float:
    """Return the memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def read(path: Path) -> dict[str, object]:
    before, began = resident(), time.process_time()
    answer: dict[str, object] = {}
    try:
        shards = Shards.of([ShardFile.at(path)])
        samples = [shards.read(number) for number in range(min(len(shards), _MOST))]
        answer["keys"] = [shards.locate(number)[1] for number in range(len(shards))]
        answer["images"] = [sample.image.decode("latin-1") for sample in samples]
    except DataError as error:
        answer["error"] = str(error)
    except Exception:  # must not happen: the test prints it
        answer["crash"] = traceback.format_exc()
    answer["seconds"] = time.process_time() - began
    # peak memory of this process; it does not inherit its parent's peak
    answer["growth"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    return answer


def main() -> None:
    for name in sys.argv[1:]:
        process = os.fork()
        if not process:
            signal.alarm(_SECONDS)
            os.write(1, json.dumps({"path": name, **read(Path(name))}).encode() + b"\n")
            os._exit(0)
        _, status = os.waitpid(process, 0)
        if status:
            print(json.dumps({"path": name, "crash": f"status {status}"}), flush=True)


if __name__ == "__main__":
    main()
