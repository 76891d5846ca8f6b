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
from functools import partial
from pathlib import Path

PARENT = os.getppid()  # read before torch loads, which takes seconds: torchrun may die meanwhile

# A thread of torch that waits must not spin: where loader processes share the cores, a step then takes up to five
# times as long. Read when torch loads, so it is set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if __name__ == "__main__":
    # no traceback for a Ctrl-C while torch loads; main has its own way
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

from clipkit import distributed
from clipkit.config import Config, load_config, settings_reference, to_toml
from clipkit.errors import (
    CheckpointError,
    ClipkitError,
    ConfigError,
    DataError,
    Parser,
    StopRequest,
    end_with_launcher,
    launcher_of,
    loss_after,
    nearest,
    number,
    run_command,
    whole,
)
from clipkit.files.traits import TraitCounts
from clipkit.files.urls import shown, without_secrets
from clipkit.formats.checkpoint import latest_checkpoint, passed_over
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP, MAX_LOGIT_SCALE
from clipkit.training import guards
from clipkit.training.build import Unfreezing, first_model, flops_of_steps, lock, scored_weights, shape_of
from clipkit.training.checkpoint import (
    CheckpointWriter,
    LoopState,
    append_bad_samples,
    as_replayed,
    bad_share,
    check_bad_samples,
    drop_bad_samples_after,
    list_truncated,
    load_training,
    manifest_file,
    only_trainer_of,
    planned_steps,
    too_many_bad,
)
from clipkit.training.costs import Costs, cost_table, run_costs
from clipkit.training.ema import AveragedWeights, RunningStatistics
from clipkit.training.guards import is_spike, next_usual, write_down
from clipkit.training.machines import PUBLISHED_BF16, Machine, measured_peak, published_memory, published_peak
from clipkit.training.metrics import (
    BadSampleLines,
    MetricsLog,
    Profile,
    ProgressLine,
    StepMetrics,
    Stopwatch,
    TraitLines,
    beginning,
    drop_lines_after,
    notes,
)
from clipkit.training.optim import learning_rate, make_optimizer
from clipkit.training.parallel import (
    clip_gradients,
    compile_blocks,
    complete_gradients,
    recompute_blocks,
    replicated,
    shard,
    without_values,
)
from clipkit.training.step import Teacher, TrainingStep, check_rows
from data.augment import Augmentation, require_nvjpeg
from data.loader import (
    DeviceBatches,
    Loader,
    Starvation,
    open_training_data,
    other_data,
    other_teacher,
    packed_images,
    small_stages,
    teacher_features,
    trained_preprocess,
)
from data.order import Order
from data.shards.samples import Shards
from eval import check_tasks, open_datasets
from eval.features.encoder import Ranks
from eval.report import build_report
from eval.run import Scorer

GPUS_OF_HOST = 8  # where nothing is said
DEFAULT_CONFIG = Path(__file__).parent / "configs" / "quickstart.toml"


def main() -> int:
    # 1. This process among the others, and its device.
    options = parse_arguments()
    if options.settings is not None:
        print(*settings_reference(options.settings), sep="\n")
        return 0
    stop = StopRequest()
    end_with_launcher(PARENT, leaving=lambda: stop.asked)
    distributed.check_launch()
    device = distributed.start()
    rank, world = distributed.rank(), distributed.world_size()
    chief = rank == 0

    # 2. The configuration, which never changes from here on.
    config = load_config(options.config, options.overrides)
    run = Path(config.out)
    shape = shape_of(config.model, config.loss, config.small)
    if options.dry_run:
        costs = costs_of(options, config, shape, device)
        if chief:
            print("# what differs from the defaults, which --settings lists")
            print(without_secrets(to_toml(config, differing_from=Config())), *cost_table(costs), sep="\n")
        distributed.stop()
        return 0
    if options.replay:
        config = as_replayed(config, run)
    check_split(config, world)
    if config.data.nvjpeg:
        require_nvjpeg(device)
    bf16 = use_bf16(config, device)

    # 3. The run folder: ours alone, and of this configuration.
    with only_trainer_of(run, config, chief=chief, launcher=launcher_of(PARENT)):
        # 4. The data, training and evaluation, checked before anything is computed.
        begun = chief and latest_checkpoint(run) is not None
        shards = open_training_data(
            config.data, manifest_file(run), chief=chief, begun=begun, share=distributed.bytes_of_chief
        )
        packed = packed_images(config.data, shards.manifest, chief=chief, share=distributed.bytes_of_chief)
        datasets = open_datasets(config.eval.data)
        for dataset in datasets:
            check_tasks(dataset, classes=shape.text.classes)
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

        # 5. The model and all that is built around it, from the inside out; and the batches that it wants.
        checkpoint = checkpoint_of_all(run)
        model = first_model(
            config.model, config.loss, shape, seed=config.seed, small=config.small, checkpoint=checkpoint
        )
        if checkpoint is None:  # else it is the checkpoint's
            model.preprocess = trained_preprocess(model.preprocess, config.data, packed)
        weights = model.state_dict()
        sharded = config.sharding != "none" and not options.replay  # which is of one process
        if sharded:
            model = without_values(model)
        lock(model, image=config.lock.image, text=config.lock.text)
        check_rows(model, batch_size=config.batch_size, world=world, parts=config.accumulate)
        if config.compile:
            compile_blocks(model)
        if config.recompute:
            recompute_blocks(model, every=config.recompute)
        if sharded:
            shard(model, weights, config.sharding, device=device, reshard=config.reshard)
        del weights
        model.to(device)
        optimizer = make_optimizer(model, config.optim)
        averaged = AveragedWeights(model, config.optim.average) if config.optim.average else None
        unfreezing = (
            Unfreezing(model, every=config.lock.unfreeze_every) if config.lock.unfreeze_every else None
        )
        teacher = None
        if config.distill.teacher:
            teacher = Teacher(config.distill.teacher, model, device=device, bf16=bf16)
        compute = TrainingStep(
            shape=shape,
            loss=config.loss,
            distill=config.distill,
            teacher=teacher,
            patch_dropout=config.model.patch_dropout,
            seed=config.seed,
            accumulate=config.accumulate,
            bf16=bf16,
        )
        loader = Loader(
            shards=shards,
            order=order,
            image_size=shape.vision.image_size,
            tokenize=model.tokenizer,
            augmentation=Augmentation.of(config.data),
            decoding=model.preprocess.decoding,
            rank=rank,
            world=world,
            workers=config.data.workers,
            pin=device.type == "cuda",
            decode_later=config.data.nvjpeg,
            stages=small_stages(
                config.small,
                image_size=shape.vision.image_size,
                context_length=shape.text.context_length,
            ),
            teacher=teacher_features(config.distill, shards, chief=chief),
        )

        distributed.bytes_of_chief(b"")  # the others wait for the chief, which may have looked at many files

        # 6. Resume: the state of the loop is what ``LoopState`` lists, and nothing else.
        taught_by = teacher or loader.teacher
        state = LoopState(
            step=0, data=shards.fingerprint(), teacher="" if taught_by is None else taught_by.fingerprint
        )
        planned = config.steps
        if checkpoint is not None:
            found = load_training(checkpoint, model, optimizer, averaged, partly=unfreezing is not None)
            if found.data != state.data:
                raise other_data(run, f"fingerprint {state.data}, it was {found.data}")
            if found.teacher not in ("", state.teacher):
                raise other_teacher(run, config.distill)
            check_bad_samples(found.bad_samples, found.step * config.batch_size, config.data.max_bad, run)
            state = replace(found, teacher=state.teacher)
            planned = planned_steps(checkpoint, otherwise=config.steps)
        # What a run that was killed had written after its last checkpoint will be written again.
        if chief and not options.replay:
            drop_bad_samples_after(run, state.step)
            drop_lines_after(run / "results.jsonl", state.step)
        distributed.barrier()  # no rank writes anew before that is done
        if unfreezing is not None:
            unfreezing.lock_for_step(state.step)
        trained = replicated(model)
        if options.replay:
            batch = loader.on_device(loader.batch(state.step), state.step, device)
            print("\n".join(guards.replayed(model, compute, batch, state.step, loader.names(batch.ids))))
            return 0

        # 7. The loop.
        if chief:
            print(without_secrets(to_toml(config, differing_from=Config())), file=sys.stderr)
        progress = ProgressLine(steps=config.steps, done=state.step, shown=chief)
        truncated = list_truncated(run, shards.manifest.truncated_shards()) if chief else []
        layers = 0 if unfreezing is None else unfreezing.layers
        for line in (
            *describe(model, order, shards, world, device, config, bf16=bf16),
            *beginning(run, state.step, config, planned=planned),
            *notes(config, step=state.step, samples=order.samples, layers=layers),
            *truncated,
            *(packed.notes if checkpoint is None else ()),
        ):
            progress.say(line)
        if checkpoint is not None and (bad := passed_over(checkpoint)):
            progress.say(f"note: {', '.join(bad)} is damaged or missing; {checkpoint.name} was taken instead")
        log = MetricsLog(run, config, step=state.step, kept=chief)
        trait_lines = TraitLines(
            progress,
            loader.decoding,
            background=config.data.background,
            upright=config.data.upright,
        )
        scorer = Scorer(
            model=model,
            datasets=datasets,
            run=run,
            ranks=Ranks(rank=rank, world=world, gather=distributed.sum_over_ranks),
            batch_size=config.eval.batch_size,
            bf16=bf16,
            say=progress.say,
            record=log.write_scores,
            note=trait_lines.say,
            as_scored=partial(scored_weights, model, averaged, reshard=config.reshard),
        )
        writer = CheckpointWriter(
            run, config, keep=config.checkpoint.keep, saved=None if checkpoint is None else state.step
        )
        bad_lines = BadSampleLines(progress, total=state.bad_samples, listed=f"{run}/bad_samples*.jsonl")
        statistics = RunningStatistics(model)
        watch = Stopwatch(device)
        flops = flops_of_steps(model, config.model.patch_dropout, config.batch_size)
        dtype = torch.bfloat16 if bf16 else torch.float32
        peak = measured_peak(device, dtype) if flops is not None else None
        batches = DeviceBatches(loader, state.step, config.steps, device)
        starvation = Starvation(config.data.workers, ", ".join(map(shown, config.data.sources)))
        profiled = Profile(run, options.profile if chief else 0, device=device, say=progress.say)
        most = math.log(MAX_LOGIT_SCALE) if config.loss.name != "siglip" else math.inf  # of the temperature
        step, stopped = state.step, False
        began, saved_at = clock() - state.seconds, clock()
        try:
            # a run that was stopped leaves its last step's scores to us; weights from elsewhere have some at once
            if is_due(step, config.eval.every_steps) or (step == 0 and config.model.weights):
                scorer.score_if_owed(step)
            stop.save_first(True, loss_after(writer.saved_step))
            # while a GPU trains there may be no memory for a measurement, and its peak is rarely measured too low
            measure = partial(measured_peak, device, dtype, together=False) if device.type == "cpu" else None
            steps = StepMetrics(watch, device=device, ranks=world, peak=peak, measure=measure)
            profiled.start()
            while step < config.steps and not stopped:
                # 7a. The next batch, already on its way.
                watch.begin("data")
                fault: DataError | None = None
                try:
                    batch = next(batches)
                except DataError as error:  # of this rank alone: all ranks agree in 7c, and stop together
                    fault = error
                    batch = loader.placeholder(step, error).to(device)
                starvation.count(batch)
                if unfreezing is not None and unfreezing.lock_for_step(step):
                    trained = replicated(model)
                    flops = flops_of_steps(model, config.model.patch_dropout, config.batch_size)

                # 7b. The gradient of the global batch, clipped.
                rate = learning_rate(step, config.steps, config.optim)
                for group in optimizer.param_groups:
                    group["lr"] = rate * group["lr_scale"]
                optimizer.zero_grad(set_to_none=True)
                if statistics:
                    writer.wait_until_copied()
                    statistics.keep()
                features = compute.gradients(trained, batch, step, watch)
                complete_gradients(model)
                norm_here = clip_gradients(model, config.optim.clip_norm)
                loss, norm = torch.stack([features.loss.float(), norm_here.float()]).tolist()

                # 7c. What all ranks must agree on before weights change. Only the chief's clock counts.
                watch.begin("agreement")
                bad_here = [asdict(one) for one in batch.bad]
                append_bad_samples(run, bad_here, step + 1, rank=rank)
                bad_lines.found(bad_here)
                minutes = chief and 0 < config.checkpoint.every_minutes <= (clock() - saved_at) / 60
                broken = not (math.isfinite(loss) and math.isfinite(norm))
                updates, factor = step - state.skipped, config.optim.skip_above
                spike = is_spike(norm, state.usual_norm, factor=factor, updates=updates)
                traits = batch.traits
                here = [stop.asked, len(bad_here), minutes, broken, spike, fault is not None]
                here += [traits.transparent, traits.rotated]
                asked_to_stop, newly_bad, time_to_save, broken_ranks, spikes, faults, transparent, rotated = (
                    distributed.sum_over_ranks(torch.tensor(here, dtype=torch.int64)).tolist()
                )
                spike = spikes > 0
                if faults:
                    causes = distributed.gather_objects("" if fault is None else str(fault))
                    kept = "no step was made"
                    if step:
                        statistics.put_back()
                        writer.save_now(model, optimizer, replace(state, seconds=clock() - began), averaged)
                        kept = f"step {step} is saved, and the same command resumes once that is corrected"
                    raise DataError(f"{next(filter(None, causes))}; {kept}")
                if broken_ranks:
                    write_down(run, loader.names(batch.ids), step=step, rank=rank)
                    statistics.put_back()
                    writer.save_now(model, optimizer, replace(state, seconds=clock() - began), averaged)
                    raise ClipkitError(guards.line(run, step, loss, norm))

                # 7d. One update, unless the gradient is a spike.
                watch.begin("optimizer")
                writer.wait_until_copied()
                usual = next_usual(state.usual_norm, norm, factor=factor, updates=updates)
                if spike:
                    statistics.put_back()
                else:
                    optimizer.step()
                    with torch.no_grad():
                        model.logit_scale.clamp_(0, most)
                    if averaged is not None:
                        averaged.update(updates + 1)
                step += 1
                state = replace(
                    state,
                    step=step,
                    seconds=clock() - began,
                    bad_samples=state.bad_samples + newly_bad,
                    transparent=state.transparent + transparent,
                    rotated=state.rotated + rotated,
                    skipped=state.skipped + spike,
                    usual_norm=usual,
                )
                watch.begin("other")
                trait_lines.say("drawn so far, repeats counted", drawn(state, config.batch_size))
                progress.advance(step)
                profiled.step()
                steps.step(
                    samples=config.batch_size, flops=flops and flops(batch.lengths, batch.images.shape[-1])
                )
                writer.finish_if_done()
                stop.otherwise = loss_after(writer.saved_step)

                # 7e. What is due after this step.
                stopped = asked_to_stop > 0 or too_many_bad(
                    state.bad_samples, step * config.batch_size, config.data.max_bad
                )
                last = step == config.steps
                due_score = is_due(step, config.eval.every_steps) and not last and not stopped
                due_save = (
                    last or stopped or bool(time_to_save) or is_due(step, config.checkpoint.every_steps)
                )

                # 7f. What is shown and recorded.
                if step == 1 or is_due(step, config.log.every_steps) or due_score or due_save:
                    metrics = {
                        "epoch": (step - 1) // order.batches_per_epoch,
                        "samples": step * config.batch_size,
                        "loss": loss,
                        **compute.figures(batch, features),
                        "scale": model.logit_scale.exp().item(),
                        "lr": rate,
                        "grad_norm": norm,
                        "bad_samples": state.bad_samples,
                        "transparent": state.transparent,
                        "rotated": state.rotated,
                        "skipped": state.skipped,
                        "truncated_shards": len(shards.manifest.truncated),
                        "seconds": state.seconds,
                        **steps.read(),
                        "transfer_time": batches.seconds().transfer,
                    }
                    progress.update(step, metrics)
                    if waited := steps.starved():
                        progress.say(f"data were waited for {waited:.0%} of the time; {starvation.cause()}")
                    bad_lines.sum_up(state.bad_samples)
                    log.write(step, metrics)

                # 7g. Scores on what it never saw, by all ranks together; then a checkpoint.
                if due_score:
                    scorer.score(step)
                if due_save:
                    writer.begin(model, optimizer, state, averaged)
                    if last or stopped:
                        writer.finish()
                    saved_at = clock()
                if due_score or due_save:
                    steps.leave_out()

            # 8. The end: the last scores, and the page that shows it all.
            if not stopped:
                stop.save_first(False, "all steps are saved; the same command scores and reports")
                scorer.score_if_owed(step)
        finally:
            profiled.close()
            batches.close()
            bad_lines.sum_up(state.bad_samples, at_once=True)
            progress.close()
            log.close()
            writer.close()
        if stopped:
            # waits for all ranks: one that ends with an error would end rank 0 while it saves
            number = int(distributed.greatest_over_ranks(torch.tensor(stop.number)))
            check_bad_samples(state.bad_samples, step * config.batch_size, config.data.max_bad, run)
        if state.bad_samples:
            progress.say(bad_share(state.bad_samples, step * config.batch_size, config.data.max_bad))
        trait_lines.say("drawn in all, repeats counted", drawn(state, config.batch_size))
        if stopped:
            progress.say(f"stopped and saved at step {step} of {config.steps}; the same command resumes")
        elif chief:
            progress.say(f"done: {build_report(run)}")
    distributed.stop()
    return 128 + number if stopped else 0


def clock() -> float:
    return time.monotonic()


def drawn(state: LoopState, batch_size: int) -> TraitCounts:
    """How many of all images that were trained on are transparent or rotated by EXIF."""
    return TraitCounts(images=state.step * batch_size, transparent=state.transparent, rotated=state.rotated)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        prog="train.py",
        description="Train a CLIP. The same command again resumes a run that was stopped.",
        epilog="example: torchrun --nproc-per-node 8 train.py configs/vit_b_32.toml data.train=DIR optim.lr=1e-3",
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="default: configs/quickstart.toml")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings instead of the file's; --settings lists them all",
    )
    parser.add_argument(
        "--settings",
        nargs="?",
        const="",
        metavar="NAME",
        help="print every setting, or those whose name begins with NAME (such as optim or optim.lr), with its "
        "default, what it does and which values fit, and stop",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the run's settings and what it would cost, and stop; data are not looked at",
    )
    parser.add_argument(
        "--replay",
        action="store_true",
        help="compute the next step, change nothing, and tell what is not finite",
    )
    parser.add_argument(
        "--profile",
        type=whole(0, 1_000_000),
        default=0,
        metavar="N",
        help="record N steps with torch's profiler",
    )
    costs = parser.add_argument_group("with --dry-run", "default: the processes and the device that are here")
    costs.add_argument("--gpu", metavar="NAME", help="on which GPUs, such as H100 or A100-40GB")
    costs.add_argument("--gpus", type=whole(1, 1_000_000), default=0, metavar="N", help="how many in all")
    costs.add_argument(
        "--gpus-per-host",
        type=whole(1, 1_000_000),
        default=0,
        metavar="N",
        help="for sharding=hybrid; 8 where nothing is said",
    )
    costs.add_argument(
        "--mfu",
        type=number(0, 1, above=True),
        metavar="SHARE",
        help="share of the peak that is reached, 0.1 where nothing is said; 0.4 on a CPU",
    )
    options = parser.parse_intermixed_args()
    if not options.dry_run and (options.gpu or options.gpus or options.gpus_per_host):
        parser.error("--gpu, --gpus and --gpus-per-host go with --dry-run")
    given = [one for one in (options.config, *options.overrides) if one is not None]
    files = [one for one in given if "=" not in one and (one == given[0] or one.endswith(".toml"))]
    if len(files) > 1:
        both = " and ".join(files)
        raise ConfigError(f"{both} are given: one file is complete, and settings are key=value")
    options.overrides = [one for one in given if one not in files]
    options.config = Path(files[0]) if files else DEFAULT_CONFIG
    return options


def checkpoint_of_all(run: Path) -> Path | None:
    """The newest checkpoint as the chief sees it, which every rank must see too."""
    newest = latest_checkpoint(run) if distributed.rank() == 0 else None
    name = distributed.bytes_of_chief(newest.name.encode() if newest else b"").decode()
    if not name:
        return None
    checkpoint = run / "checkpoints" / name
    if not (checkpoint / "state.json").is_file():
        raise CheckpointError(
            f"{checkpoint} is not seen from here: {run} must lie on a disk that all hosts share"
        )
    return checkpoint


def check_split(config: Config, world: int) -> None:
    if config.batch_size < world * config.accumulate:
        raise ConfigError(
            f"batch_size = {config.batch_size} cannot be split over {world} processes × "
            f"accumulate = {config.accumulate}"
        )


def costs_of(options: argparse.Namespace, config: Config, shape: Architecture, device: torch.device) -> Costs:
    """What the run would cost on the GPUs that are named, or on this machine's device."""
    world = options.gpus or distributed.world_size()
    check_split(config, world)
    bf16 = use_bf16(config, device)
    if options.gpu:
        peak, bf16 = published_peak(options.gpu), config.precision != "fp32"
        if peak is None:
            raise ConfigError(f"--gpu {options.gpu} is unknown: {nearest(options.gpu, PUBLISHED_BF16)}")
        machine = Machine(
            gpu=options.gpu,
            memory=published_memory(options.gpu),
            peak=peak if bf16 else None,
            measured=False,
        )
    else:
        peak = measured_peak(device, torch.bfloat16 if bf16 else torch.float32)
        gpu, memory = "", None
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            gpu, memory = properties.name, properties.total_memory
        machine = Machine(gpu=gpu, memory=memory, peak=peak, measured=True)
    here = min(options.gpus, GPUS_OF_HOST) or distributed.ranks_of_host()
    shard_ranks = options.gpus_per_host or here
    return run_costs(config, shape, machine, world=world, shard_ranks=shard_ranks, bf16=bf16, mfu=options.mfu)


def use_bf16(config: Config, device: torch.device) -> bool:
    if config.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return config.precision == "bf16"


def describe(
    model: CLIP, order: Order, shards: Shards, world: int, device: torch.device, config: Config, *, bf16: bool
) -> list[str]:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    precision = "bf16" if bf16 else "fp32"
    samples = ", ".join(
        filter(None, (f"{order.samples} samples", shards.manifest.left_out(shards.selection)))
    )
    sources = [shown(source) for source in config.data.sources]
    lines = [
        f"{model.name}, {parameters / 1e6:.1f} M parameters, {precision} on {world} × {device.type}",
        f"{samples}; {order.describe(config.steps, sources)}",
    ]
    return [*lines, told] if (told := str(model.preprocess.decoding)) else lines


if __name__ == "__main__":
    run_command(distributed.together(main))
