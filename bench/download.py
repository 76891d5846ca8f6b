"""Compare ``python -m data download`` with img2dataset on one table of URLs, served by nginx on loopback.

    python -m bench.download --img2dataset VENV/bin/img2dataset [--urls 20000] [--rounds 1] [--kills 5]

img2dataset needs an environment of its own (``VENV/bin/pip install img2dataset 'setuptools<81'``). Images are crops
of scikit-learn's two photographs with sides of 200 to 1,000 pixels. About a tenth of the URLs fail: 404, 503, 429
with Retry-After above a rate, truncated, slow, too large or non-image responses, and redirect loops. Both programs
use 64 connections, a timeout of 10 s, two retries, a shorter side of 256 pixels and JPEG quality 95.

Reports images per second of each, and the URLs that only one of them stored, for this table and for one without
slow responses: img2dataset's timeout applies to each read, so it waits minutes for these. For clipkit, also reports
its peak memory, whether shards are identical after ``kill -9`` is sent ``--kills`` times, whether an image is lost
or stored twice, and a bound: the rate of decoding, resizing and encoding alone with two threads.
"""

import argparse
import csv
import json
import os
import platform
import random
import resource
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from pyarrow import parquet
from sklearn.datasets import load_sample_images

from data.shards.images import Resize, Storing, store_image

RESULTS = Path(__file__).parent / "results"
SIZE, PORT, CUT_PORT = 256, 8761, 8762
CONFIG = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 2048; }}
http {{
    access_log off; keepalive_requests 1000000; types {{ image/jpeg jpg; text/html html; }}
    client_body_temp_path {folder}/tmp; proxy_temp_path {folder}/tmp; fastcgi_temp_path {folder}/tmp;
    uwsgi_temp_path {folder}/tmp; scgi_temp_path {folder}/tmp;
    limit_req_zone $server_name zone=limited:1m rate=20r/s;
    server {{
        listen 127.0.0.1:{port}; root {folder}/www;
        location /limited/ {{
            alias {folder}/www/img/; limit_req zone=limited burst=5; limit_req_status 429;
            add_header Retry-After 1 always;
        }}
        location /busy/ {{ return 503; }}
        location /loop/ {{ return 302 $request_uri; }}
        location /slow/ {{ alias {folder}/www/img/; limit_rate 500; }}
        location /large/ {{ alias {folder}/www/; try_files /large.jpg =404; }}
        location /page/ {{ alias {folder}/www/; try_files /page.html =404; }}
    }}
}}
"""
FAULTS = {
    "limited": 200,
    "busy": 400,
    "missing": 800,
    "loop": 200,
    "cut": 200,
    "slow": 40,
    "large": 4,
    "page": 200,
}


def make_images(folder: Path, count: int) -> None:
    """Write JPEGs of random crops."""
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    draw = random.Random(0)
    for i in range(count):
        width, height, scale = draw.randint(200, 600), draw.randint(200, 400), draw.uniform(1, 1.7)
        left, top = draw.randint(0, 640 - width), draw.randint(0, 427 - height)
        crop = photos[i % 2].crop((left, top, left + width, top + height))
        crop.resize((int(width * scale), int(height * scale))).save(
            folder / f"{i}.jpg", quality=draw.randint(75, 92)
        )


def write_table(path: Path, count: int, without: str = "") -> None:
    """Write URLs and captions in random order; ``FAULTS`` has the number of rows of each fault per 20,000."""
    numbers = {kind: max(1, number * count // 20_000) for kind, number in FAULTS.items() if kind != without}
    kinds = [kind for kind, number in numbers.items() for _ in range(number)]
    kinds += ["img"] * (count - len(kinds))
    random.Random(1).shuffle(kinds)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["url", "caption"])
        for i, kind in enumerate(kinds):
            port = CUT_PORT if kind == "cut" else PORT
            writer.writerow([f"http://127.0.0.1:{port}/{kind}/{i}.jpg", f"caption {i}"])


class Cut(socketserver.StreamRequestHandler):
    """Send only half of the announced body."""

    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 20000\r\n\r\n" + bytes(10_000))


def ours(table: Path, out: Path, shard: int) -> list[str]:
    return [
        sys.executable, "-m", "data", "download", str(table), str(out), "--allow-private", "--quiet",
        "--connections", "64", "--per-host", "64", "--timeout", "10", "--retries", "2",
        "--resize", "keep_ratio", "--image-size", str(SIZE), "--samples-per-shard", str(shard),
    ]  # fmt: skip


def theirs(program: str, table: Path, out: Path, shard: int) -> list[str]:
    return [
        program, "--url_list", str(table), "--input_format", "csv", "--url_col", "url", "--caption_col", "caption",
        "--output_format", "webdataset", "--output_folder", str(out), "--processes_count", "2",
        "--thread_count", "32", "--image_size", str(SIZE), "--resize_mode", "keep_ratio",
        "--resize_only_if_bigger", "True", "--skip_reencode", "True", "--encode_quality", "95", "--timeout", "10",
        "--retries", "2", "--number_sample_per_shard", str(shard), "--extract_exif", "False",
    ]  # fmt: skip


def timed(command: list[str]) -> tuple[float, float, float]:
    """Run a command.

    Returns:
        Its duration and the CPU time of it and its child processes, in seconds; its own peak memory in MB.
    """
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max([peak, *(int(line.split()[1]) / 1024 for line in status.splitlines() if "VmHWM" in line)])
        time.sleep(0.1)
    assert process.returncode == 0, command
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak


def kept(out: Path) -> Counter[str]:
    """Return how often each URL is in the shards."""
    found = Counter[str]()
    for path in sorted(out.glob("*.parquet")):
        columns = parquet.read_table(path, columns=["url", "status"]).to_pydict()
        found.update(
            url for url, status in zip(columns["url"], columns["status"], strict=True) if status == "success"
        )
    return found


def kinds(urls: set[str]) -> dict[str, int]:
    """Count URLs by how the server answers them."""
    return dict(Counter(url.split("/")[3] for url in urls).most_common())


def bound(folder: Path) -> float:
    """Return images per second of decoding, resizing and encoding with two threads."""
    Image.init()
    files = [path.read_bytes() for path in sorted(folder.iterdir())[:1000]]
    how = Storing(resize=Resize(mode="keep_ratio", size=SIZE))
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda data: store_image(data, how), files))
    return len(files) / (time.monotonic() - began)


def killed(command: list[str], kills: int, seconds: float) -> int:
    """Kill a command at random moments, then run it to completion; return how often it was killed."""
    draw = random.Random(2)
    for number in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(draw.uniform(0.3, 1.2) * seconds / kills + 3)
            return number
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    timed(command)
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--img2dataset", required=True, metavar="PROGRAM")
    parser.add_argument("--urls", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    nginx = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
    assert nginx is not None, "install nginx"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # nginx's worker is another user
        images = folder / "www" / "img"
        tables = {"all": folder / "urls.csv", "without slow": folder / "urls-without-slow.csv"}
        images.mkdir(parents=True)
        make_images(images, options.urls)
        (folder / "www" / "page.html").write_text("<html>not here</html>")
        large = (images / "0.jpg").read_bytes()
        (folder / "www" / "large.jpg").write_bytes(large + bytes(80 * 2**20))
        write_table(tables["all"], options.urls)
        write_table(tables["without slow"], options.urls, without="slow")
        (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, port=PORT))
        server = subprocess.Popen([nginx, "-p", name, "-c", f"{name}/nginx.conf", "-e", f"{name}/error.log"])
        cut = socketserver.ThreadingTCPServer(("127.0.0.1", CUT_PORT), Cut)
        threading.Thread(target=cut.serve_forever, daemon=True).start()
        shard = max(1, options.urls // 4)
        rounds: list[dict[str, Any]] = []
        try:
            time.sleep(1)
            for turn, responses in product(range(options.rounds), tables):
                table = tables[responses]
                out = {who: folder / f"{who}-{turn}-{responses}" for who in ("clipkit", "img2dataset")}
                commands = {
                    "clipkit": ours(table, out["clipkit"], shard),
                    "img2dataset": theirs(options.img2dataset, table, out["img2dataset"], shard),
                }
                order = list(commands) if turn % 2 else list(commands)[::-1]
                used = {who: timed(commands[who]) for who in order}
                found = {who: kept(out[who]) for who in commands}
                rates = {who: found[who].total() / used[who][0] for who in commands}
                rounds.append(
                    {
                        "responses": responses,
                        "seconds": {who: used[who][0] for who in commands},
                        "cpu_seconds": {who: used[who][1] for who in commands},
                        "images_per_second": rates,
                        "ratio": rates["clipkit"] / rates["img2dataset"],
                        "memory_mb": used["clipkit"][2],
                        "load": os.getloadavg()[0],
                        "kept": {who: found[who].total() for who in commands},
                        "only_clipkit": kinds(set(found["clipkit"]) - set(found["img2dataset"])),
                        "only_img2dataset": kinds(set(found["img2dataset"]) - set(found["clipkit"])),
                    }
                )
                print(json.dumps(rounds[-1], indent=2), flush=True)
            whole = folder / "clipkit-0-all"
            again = folder / "killed"
            count = killed(ours(tables["all"], again, shard), options.kills, rounds[0]["seconds"]["clipkit"])
            same = {
                path.name: path.read_bytes() == (again / path.name).read_bytes()
                for path in sorted(whole.glob("*.tar"))
            }
            result = {
                "urls": options.urls,
                "rounds": rounds,
                "bound_images_per_second": bound(images),
                "kills": count,
                "shards_identical_after_kills": sum(same.values()),
                "shards": len(same),
                "repeated_after_kills": sum(number - 1 for number in kept(again).values()),
                "missing_after_kills": kinds(set(kept(whole)) - set(kept(again))),
                "machine": platform.machine(),
                "cores": os.cpu_count(),
                "load": os.getloadavg()[0],
            }
        finally:
            cut.shutdown()
            server.terminate()
            server.wait()
    print(json.dumps(result, indent=2))
    (RESULTS / "download.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
