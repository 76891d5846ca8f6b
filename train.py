"""Train a CLIP: ``torchrun train.py [CONFIG.toml] [key=value …]``, or ``python train.py`` for one process.

Read from top to bottom in the order in which things happen: build, resume, loop, evaluate, save. The same
command again resumes where the run was left, with the same weights, bit for bit, as if it had never stopped.
With more ``steps`` it goes on past a run's end, at the rate that the longer run has there.
"""

import argparse
import math
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

# A thread of torch that waits must not spin: where loader processes share the cores, a step then takes up to five
# times as long. Read when torch loads, so it is set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if __name__ == "__main__":
    # no traceback for a Ctrl-C while torch loads; main has its own way
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from torch.nn.parallel import DistributedDataParallel

from clipkit import distributed
from clipkit.accumulation import backward
from clipkit.api import load
from clipkit.architectures import Architecture
from clipkit.checkpoint import LoopState, latest_checkpoint, load_training, passed_over, save_checkpoint
from clipkit.config import Config
from clipkit.config_file import load_config, to_toml
from clipkit.count_progress import CountProgress
from clipkit.errors import CheckpointError, ClipkitError, ConfigError, run_command
from clipkit.family import architecture
from clipkit.loss import clip_loss
from clipkit.model import CLIP, MAX_LOGIT_SCALE, create
from clipkit.optim import adamw, learning_rate
from clipkit.process import StopRequest, loss_after
from clipkit.progress import BadSampleLines, MetricsLog, ProgressLine, drop_lines_after
from clipkit.run_folder import (
    append_bad_samples,
    bad_share,
    check_bad_samples,
    drop_bad_samples_after,
    hint_of_moved_data,
    manifest_file,
    only_trainer_of,
    too_many_bad,
)
from clipkit.urls import shown, without_secrets
from data.augment import Augmentation
from data.cache import shard_cache
from data.captions import CaptionRule
from data.device_decode import require_nvjpeg
from data.loader import Loader
from data.manifest import Manifest, make_manifest
from data.order import Order
from data.remote.shard_cache import ShardCache
from data.selection import Filter, Selection
from data.shards import Shards
from data.sources import find_shards
from eval import check_tasks, open_datasets
from eval.encode import Ranks
from eval.report import build_report
from eval.scorer import Scorer

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "quickstart.toml"


def main() -> int:
    # 1. This process among the others, and its device.
    options = parse_arguments()
    stop = StopRequest()
    distributed.check_launch()
    device = distributed.start()
    rank, world = distributed.rank(), distributed.world_size()
    chief = rank == 0

    # 2. The configuration, which never changes from here on.
    config = load_config(options.config, options.overrides)
    run = Path(config.out)
    if options.dry_run:
        print(without_secrets(to_toml(config)) if chief else "", end="")
        distributed.stop()
        return 0
    check_split(config, world)
    if config.data.nvjpeg:
        require_nvjpeg(device)
    bf16 = use_bf16(config, device)

    # 3. The run folder: ours alone, and of this configuration.
    with only_trainer_of(run, config, chief=chief):
        # 4. The data, training and evaluation, checked before anything is computed.
        selection = selection_of(config)
        cache = shard_cache(config.data.sources, config.data.cache_gb)
        shards = Shards(manifest_of(config, selection, cache, run, chief=chief), selection, cache=cache)
        datasets = open_datasets(config.eval.data)
        for dataset in datasets:
            check_tasks(dataset)
        order = Order(
            shards.counts,
            seed=config.seed,
            batch_size=config.batch_size,
            window=config.data.window,
            wrap=config.data.last == "wrap",
            sources=shards.manifest.sources,
            weights=config.data.weights,
            resample=config.data.resample,
        )
        shape = architecture(
            config.model.name,
            image=config.model.image,
            text=config.model.text,
            image_size=config.model.image_size,
            context_length=config.model.context_length,
        )

        # 5. The model, the optimizer, and the batches that the model wants.
        model = first_model(config, shape).to(device)
        optimizer = adamw(model, config.optim)
        loader = Loader(
            shards=shards,
            order=order,
            image_size=shape.vision.image_size,
            tokenize=model.tokenizer,
            augmentation=Augmentation(
                crop_scale=config.data.crop_scale,
                flip=config.data.flip,
                color_jitter=config.data.color_jitter,
                grayscale=config.data.grayscale,
                scaled_decode=config.data.scaled_decode,
            ),
            rank=rank,
            world=world,
            workers=config.data.workers,
            pin=device.type == "cuda",
            decode_later=config.data.nvjpeg,
        )

        # 6. Resume: the state of the loop is what ``LoopState`` lists, and nothing else.
        state = LoopState(step=0, data=shards.fingerprint())
        checkpoint, planned = latest_checkpoint(run), config.steps
        if checkpoint is not None:
            found = load_training(checkpoint, model, optimizer)
            if found.data != state.data:
                raise other_data(run, f"fingerprint {state.data}, it was {found.data}")
            check_bad_samples(found.bad_samples, found.step * config.batch_size, config.data.max_bad, run)
            state, planned = found, load_config(checkpoint / "config.toml").steps
        # What a run that was killed had written after its last checkpoint will be written again.
        if chief:
            drop_bad_samples_after(run, state.step)
            drop_lines_after(run / "results.jsonl", state.step)
        distributed.barrier()  # no rank writes anew before that is done
        trained: torch.nn.Module = model
        if world > 1:
            trained = DistributedDataParallel(model, gradient_as_bucket_view=True)

        # 7. The loop.
        if chief:
            print(without_secrets(to_toml(config, differing_from=Config())), file=sys.stderr)
        progress = ProgressLine(steps=config.steps, done=state.step, shown=chief)
        progress.say(describe(model, order, shards, world, device, config, bf16=bf16))
        progress.say(beginning(run, state.step, config, planned=planned))
        if checkpoint is not None and (bad := passed_over(checkpoint)):
            progress.say(f"note: {', '.join(bad)} is damaged or missing; {checkpoint.name} was taken instead")
        log = MetricsLog(run, config, step=state.step, kept=chief)
        scorer = Scorer(
            model=model,
            datasets=datasets,
            run=run,
            ranks=Ranks(rank=rank, world=world, gather=distributed.sum_over_ranks),
            batch_size=config.eval.batch_size,
            bf16=bf16,
            say=progress.say,
            record=log.write_scores,
        )
        bad_lines = BadSampleLines(progress, total=state.bad_samples, listed=f"{run}/bad_samples*.jsonl")
        batches = loader.batches(state.step, config.steps)
        step, bad_samples, stopped = state.step, state.bad_samples, False
        began = clock() - state.seconds
        saved_step, saved_at = step, clock()
        window_began, window_step, waited = clock(), step, 0.0
        try:
            if is_due(step, config.eval.every_steps):
                scorer.score_if_owed(step)  # a run that was stopped leaves the scores of its last step to us
            stop.save_first(True, loss_after(saved_step))
            while step < config.steps and not stopped:
                # 7a. The next batch, already on its way.
                asked = clock()
                batch = next(batches)
                batch = loader.on_device(batch, step, device)
                images, tokens = batch.images, batch.tokens
                waited += clock() - asked

                # 7b. The gradient of the global batch, clipped, and one update.
                rate = learning_rate(step, config.steps, config.optim)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.zero_grad(set_to_none=True)
                loss = backward(
                    trained, images, tokens, loss=clip_loss, parts=config.accumulate, autocast=bf16
                )
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm or math.inf)
                optimizer.step()
                with torch.no_grad():
                    model.logit_scale.clamp_(0, math.log(MAX_LOGIT_SCALE))
                step += 1
                progress.advance(step)

                # 7c. What all ranks must agree on: whether to stop, and how many samples were bad.
                bad_here = [asdict(one) for one in batch.bad]
                append_bad_samples(run, bad_here, step, rank=rank)
                bad_lines.found(bad_here)
                asked_to_stop, newly_bad = distributed.sum_over_ranks(
                    torch.tensor([int(stop.asked), len(bad_here)])
                ).tolist()
                bad_samples += newly_bad
                stopped = asked_to_stop > 0 or too_many_bad(
                    bad_samples, step * config.batch_size, config.data.max_bad
                )

                # 7d. What is due after this step. Only the chief's clock counts, and only it saves.
                last = step == config.steps
                due_score = is_due(step, config.eval.every_steps) and not last and not stopped
                minutes = (clock() - saved_at) / 60
                due_save = last or stopped or is_due(step, config.checkpoint.every_steps)
                due_save |= 0 < config.checkpoint.every_minutes <= minutes

                # 7e. What is shown and recorded. A loss that is no number ends the run before it is saved.
                if step == 1 or is_due(step, config.log.every_steps) or due_score or due_save:
                    if not math.isfinite(value := loss.item()):
                        raise ClipkitError(
                            f"the loss of step {step} is {value}; the last checkpoint is of step {saved_step}: "
                            "try a lower optim.lr, a longer optim.warmup or precision=fp32"
                        )
                    elapsed = clock() - window_began
                    metrics = {
                        "epoch": (step - 1) // order.batches_per_epoch,
                        "samples": step * config.batch_size,
                        "loss": value,
                        "chance": math.log(config.batch_size),
                        "samples_per_second": (step - window_step) * config.batch_size / elapsed,
                        "data_time": waited / elapsed,
                        "logit_scale": model.logit_scale.exp().item(),
                        "lr": rate,
                        "grad_norm": norm.item(),
                        "bad_samples": bad_samples,
                        "seconds": clock() - began,
                    }
                    progress.update(step, metrics)
                    bad_lines.sum_up(bad_samples)
                    log.write(step, metrics)

                # 7f. Scores on what it never saw, by all ranks together; then a checkpoint.
                if due_score:
                    scorer.score(step)
                if due_save:
                    if chief:
                        state = replace(state, step=step, seconds=clock() - began, bad_samples=bad_samples)
                        save_checkpoint(run, model, optimizer, state, config, keep=config.checkpoint.keep)
                    saved_step, saved_at = step, clock()
                    stop.otherwise = loss_after(saved_step)
                if step == 1 or is_due(step, config.log.every_steps) or due_score or due_save:
                    window_began, window_step, waited = clock(), step, 0.0

            # 8. The end: the last scores, and the page that shows it all.
            if not stopped:
                stop.save_first(False, "all steps are saved; the same command scores and reports")
                scorer.score_if_owed(step)
        finally:
            bad_lines.sum_up(bad_samples, at_once=True)
            progress.close()
            log.close()
        if stopped:
            distributed.barrier()  # a rank that ends with an error would end the chief while it saves
            check_bad_samples(bad_samples, step * config.batch_size, config.data.max_bad, run)
        if bad_samples:
            progress.say(bad_share(bad_samples, step * config.batch_size, config.data.max_bad))
        if stopped:
            progress.say(f"stopped and saved at step {step} of {config.steps}; the same command resumes")
        elif chief:
            progress.say(f"done: {build_report(run)}")
    distributed.stop()
    return 0


def clock() -> float:
    return time.monotonic()


def is_due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a CLIP. The same command again resumes a run that was stopped.",
        epilog="example: torchrun --nproc-per-node 8 train.py configs/vit_b_32.toml data.train=DIR optim.lr=1e-3",
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="default: configs/quickstart.toml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings instead of the file's")
    parser.add_argument("--dry-run", action="store_true", help="print the configuration and stop")
    options = parser.parse_intermixed_args()
    if options.config is not None and "=" in options.config:
        options.overrides.insert(0, options.config)
        options.config = None
    options.config = Path(options.config) if options.config else DEFAULT_CONFIG
    return options


def check_split(config: Config, world: int) -> None:
    parts = world * config.accumulate
    if config.batch_size % parts:
        raise ConfigError(
            f"batch_size = {config.batch_size} is no multiple of {world} processes × "
            f"accumulate = {config.accumulate}"
        )


def selection_of(config: Config) -> Selection:
    """Which samples count, and where their captions are."""
    data = config.data
    return Selection(
        filters=tuple(map(Filter.of, data.filters)),
        captions=CaptionRule(
            fields=data.captions,
            choice=data.caption_choice,
            weights=data.caption_weights,
            templates=data.caption_templates,
            prefix=data.caption_prefix,
        ),
    )


def manifest_of(
    config: Config, selection: Selection, cache: ShardCache | None, run: Path, *, chief: bool
) -> Manifest:
    """What is trained on: counted by the chief and the same for all ranks, and as it was when the run began."""
    content = b""
    if chief:
        with hint_of_moved_data(run):
            sources = [find_shards(source) for source in config.data.sources]
        with CountProgress("counting shards", total=sum(map(len, sources)), shown=True) as progress:
            manifest = make_manifest(sources, selection, cache=cache, progress=progress.show)
        earlier = Manifest.load(manifest_file(run))
        if earlier is not None and latest_checkpoint(run) is not None:
            if changes := manifest.changes_since(earlier):
                raise other_data(run, "; ".join(changes))
            manifest = manifest.with_counts_of(earlier)
        manifest.save(manifest_file(run))
        content = manifest.to_bytes()
    shared = Manifest.from_bytes(distributed.bytes_of_chief(content))
    assert shared is not None
    return shared


def other_data(run: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{run} was trained on other data: {what}; bring the data back, or set out=… for a new run"
    )


def first_model(config: Config, shape: Architecture) -> CLIP:
    """The model before its first step here: fresh weights, or those of ``model.weights``."""
    if not config.model.weights:
        return create(shape, name=config.model.label, seed=config.seed)
    model = load(
        config.model.weights, image_size=config.model.image_size, context_length=config.model.context_length
    )
    if model.architecture != shape:
        raise ConfigError(
            f"model.weights = {config.model.weights!r} are of {model.name or 'another architecture'}, "
            f"not of {config.model.label}: set model.name"
        )
    return model.train()


def use_bf16(config: Config, device: torch.device) -> bool:
    if config.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return config.precision == "bf16"


def beginning(run: Path, step: int, config: Config, *, planned: int) -> str:
    """What is about to happen, and what in it may not be meant; ``planned`` steps were wanted so far."""
    if step >= config.steps:
        return f"{run} has made all its {config.steps} steps"
    line = f"resuming {run} at step {step}" if step else f"starting {run}"
    if config.steps != planned:
        line += (
            f"; steps = {config.steps} now, and were {planned}: the rate follows the "
            f"{'longer' if config.steps > planned else 'shorter'} run's schedule from here on, "
            f"{learning_rate(step - 1, planned, config.optim):.3g} at step {step} and "
            f"{learning_rate(step, config.steps, config.optim):.3g} at step {step + 1}"
        )
    if config.optim.warmup >= config.steps:
        line += (
            f"; note that optim.warmup = {config.optim.warmup} is no shorter than the run of {config.steps} steps: "
            f"the rate ends at {learning_rate(config.steps - 1, config.steps, config.optim):.2g}, "
            f"and optim.lr is {config.optim.lr:g}"
        )
    return line


def describe(
    model: CLIP, order: Order, shards: Shards, world: int, device: torch.device, config: Config, *, bf16: bool
) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    precision = "bf16" if bf16 else "fp32"
    samples = ", ".join(
        filter(None, (f"{order.samples} samples", shards.manifest.left_out(shards.selection)))
    )
    sources = [shown(source) for source in config.data.sources]
    return (
        f"{model.name}, {parameters / 1e6:.1f} M parameters, {precision} on {world} × {device.type}; "
        f"{samples}; {order.describe(config.steps, sources)}"
    )


if __name__ == "__main__":
    run_command(distributed.together(main))
