"""Load ``clipkit serve`` with clients that search for different texts and fetch the thumbnails of the results.

    python -m bench.serve EMBEDDINGS [--clients 50] [--seconds 60]

Every client waits for an answer before its next request; one request in five is a thumbnail. Memory is the server's
resident memory after each quarter of the time.
"""

import argparse
import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np

RESULT = Path(__file__).parent / "results" / "serve.json"
WORDS = (
    "red",
    "blue",
    "small",
    "large",
    "old",
    "happy",
    "cat",
    "dog",
    "tree",
    "house",
    "car",
    "flower",
    "heart",
    "flag",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("embeddings")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    command = [sys.executable, "-m", "clipkit", "serve", given.embeddings, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None, "the server did not start"
        place = urlsplit(found[0]).netloc
        seconds: list[float] = []
        errors: list[str] = []
        rows = 0
        end = time.monotonic() + given.seconds

        def client(client_index: int) -> None:
            nonlocal rows
            rng, thumbnails = random.Random(client_index), [""]
            connection = http.client.HTTPConnection(place, timeout=60)
            while time.monotonic() < end:
                if rng.random() < 0.2 and thumbnails[0]:
                    path = rng.choice(thumbnails)
                else:
                    path = f"/api/search?k=20&text={quote(' '.join(rng.sample(WORDS, 3)))}"
                start = time.perf_counter()
                try:
                    connection.request("GET", path)
                    answer = connection.getresponse()
                    content = answer.read()
                except (OSError, http.client.HTTPException) as error:
                    errors.append(repr(error))
                    connection.close()
                    continue
                seconds.append(time.perf_counter() - start)
                if answer.status != 200:
                    errors.append(f"{path}: {answer.status}")
                elif "search" in path:
                    results = json.loads(content)
                    rows = results["rows"]
                    thumbnails = [one["thumbnail"] for one in results["results"]]
            connection.close()

        def memory() -> float:
            lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1e3

        threads = [threading.Thread(target=client, args=[number]) for number in range(given.clients)]
        for thread in threads:
            thread.start()
        megabytes = []
        for _ in range(4):
            time.sleep(given.seconds / 4)
            megabytes.append(memory())
        for thread in threads:
            thread.join()
        server.terminate()
    result = {
        "clients": given.clients,
        "seconds": given.seconds,
        "rows": rows,
        "requests": len(seconds),
        "requests_per_second": len(seconds) / given.seconds,
        "errors": len(errors),
        "milliseconds": {f"p{part}": 1e3 * float(np.percentile(seconds, part)) for part in (50, 99)},
        "server_megabytes": megabytes,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1), errors[:3])


if __name__ == "__main__":
    main()
