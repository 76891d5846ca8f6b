"""Train a CLIP model: ``torchrun train.py [CONFIG.toml] [key=value …]``, or ``python train.py`` for one process.

Read from top to bottom in the order of execution: build, resume, loop, evaluate, save. The same command again
resumes a run where it stopped, with bit-identical weights, as if it had never stopped. With more ``steps`` it
continues beyond the run's end, at the learning rate that the longer run has there.
"""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from clipkit.errors import report_errors, run_command
from clipkit.options import Arguments, parse_arguments

PARENT = os.getppid()  # read before torch is imported, which takes seconds: torchrun may die in the meantime

# Waiting threads must not spin: where loader processes share the cores, a step then takes up to five times as long.
# Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C while torch is imported
    with report_errors():
        arguments = parse_arguments()  # --help and errors need no torch
    gc.disable()  # collections would take a tenth of the time of imports

import torch
from torch.optim import Optimizer

from clipkit import distributed, training
from clipkit.config import Config, load_config, redact_settings, to_toml
from clipkit.errors import ClipkitError, ConfigError
from clipkit.formats import best_checkpoint
from clipkit.model import CLIP, apply_cpu_settings
from clipkit.model.architectures import Architecture
from clipkit.objectives import ObjectiveState, select_terms
from clipkit.training import build, checkpoint, costs, ema, guards, optim, parallel, stopping
from clipkit.training.backbone import LockedBackbones
from clipkit.training.log import Log, describe_model, describe_start
from clipkit.training.step import TrainingStep, check_rows
from data import augment, loader, order, training_data
from data.backbone import FeatureStore
from data.loader import small_stages
from data.shards.samples import Shards
from eval import (
    BestScore,
    EvalDataset,
    FineTune,
    Members,
    Ranks,
    Scorer,
    Target,
    check_image,
    count_scored_steps,
    find_guards,
    find_targets,
    format_verdict,
    judge_fine_tune,
    select_tasks,
)
from eval.report import build_report

if __name__ == "__main__":
    gc.freeze()  # otherwise the next collection would examine all objects of these modules
    gc.enable()

# The stages before the loop, in the order in which ``main`` calls them.


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run: training samples, their order and former processing, and datasets to score on.

    Attributes:
        targets: the datasets of ``eval.data``.
        guards: those of ``eval.guard``, without the held-out pairs.
        guard_notes: why some of these are missing.
        best: the score of ``checkpoint.best``, which has no value yet.
    """

    shards: Shards
    order: order.Order
    packed: training_data.Packed
    targets: Sequence[Target]
    guards: Sequence[Target]
    guard_notes: Sequence[str]
    best: BestScore

    @property
    def datasets(self) -> list[EvalDataset]:
        """The datasets of ``eval.data``."""
        return [target.dataset for target in self.targets]

    @property
    def held_out(self) -> Target:
        """The dataset of ``checkpoint.best``, or the first of ``eval.data``."""
        named = [target for target in self.targets if target.dataset.name == self.best.dataset]
        return (named or self.targets)[0]

    @property
    def first_samples(self) -> tuple[int, ...]:
        """Number of the first sample of each source."""
        return self.shards.first_samples

    def describe(self, config: Config, *, resumed: bool) -> list[str]:
        """Describe the training data, as lines to print."""
        manifest = self.shards.manifest
        samples = f"{self.order.samples:,} samples"
        if left_out := manifest.left_out(self.shards.selection):
            samples += f", {left_out}"
        described = self.order.describe(config.steps, config.data.redacted_sources)
        if config.trained_pairs < config.batch_size:
            described += f"; {config.trained_pairs} of the {config.batch_size} pairs of a step are trained"
            described += f" (select.fraction = {config.select.fraction:g})"
        lines = [f"{samples}; {described}"]
        lines += [f"data.balance = {config.data.balance}: {line}" for line in self.order.describe_balance()]
        lines += self.guard_notes
        if not resumed:
            lines += [*self.shards.notes, *self.packed.notes]
        return lines

    def list_notes(self, config: Config, *, step: int, layers: int) -> list[str]:
        """Return notes on settings that may be unintentional; ``layers`` are those trained in the end."""
        hosts = distributed.count_hosts()
        scored = [
            f"note: eval.data = {source!r} is data.train too: scores are of pairs that are trained"
            for source in config.eval.data
            if source in config.data.sources and Path(source).is_file()
        ]
        return scored + config.notes(step=step, samples=self.order.samples, layers=layers, hosts=hosts)


def open_samples(config: Config, recorded: Path | None, *, resumed: bool) -> tuple[Shards, order.Order]:
    """Open the training samples and make their order, see ``open_training_data``; all ranks call this."""
    shards = training_data.open_training_data(
        config.data,
        recorded,
        same_field=config.loss.same_field,
        rank0=distributed.rank() == 0,
        resumed=resumed,
        broadcast=distributed.broadcast_bytes,
    )
    sample_order = order.Order(
        shards.counts,
        seed=config.seed,
        batch_size=config.batch_size,
        window=config.data.window,
        groups=config.data.groups,
        wrap=config.data.last == "wrap",
        sources=shards.manifest.sources,
        weights=config.data.weights,
        resample=config.data.resample,
        values=shards.manifest.values,
        cap=config.data.balance_by[1],
        adjacent=config.data.adjacent,
    )
    return shards, sample_order


def count_epoch(config: Config) -> float:
    """Return the number of steps in an epoch; all ranks call this."""
    return open_samples(config, None, resumed=False)[1].steps_per_epoch


def leave_out_held_out(guards: Sequence[Target], held_out: EvalDataset) -> list[Target]:
    """Return the guard sets that are not the held-out pairs; ConfigError if another one has the same name."""
    others = [guard for guard in guards if guard.dataset.stamp != held_out.stamp]
    for guard in others:
        if guard.dataset.name == held_out.name:
            raise ConfigError(
                f"eval.guard: a dataset is called {held_out.name!r}, like the held-out pairs: rename its folder"
            )
    return others


def open_data(config: Config, shape: Architecture, *, resumed: bool) -> RunData:
    """Open and check the data for training and evaluation; all ranks call this."""
    recorded = checkpoint.manifest_file(Path(config.out))
    shards, sample_order = open_samples(config, recorded, resumed=resumed)
    packed = training_data.packed_images(
        config.data,
        config.pixels,
        shards.manifest,
        rank0=distributed.rank() == 0,
        broadcast=distributed.broadcast_bytes,
    )
    members = Members(image=config.data.image, captions=config.data.captions, optional=True)
    targets = find_targets(config.eval.data, members=members)
    datasets = [target.dataset for target in targets]
    guards, errors = find_guards(config.eval.guard, members=members)
    for dataset in (*datasets, *(guard.dataset for guard in guards)):
        select_tasks(dataset, classes=shape.text.classes)
    best = BestScore.from_setting(config.checkpoint.best, datasets, patience=config.eval.patience)
    judged = [dataset for dataset in datasets if dataset.name == best.dataset] or datasets
    guards = leave_out_held_out(guards, judged[0]) if judged else guards
    return RunData(
        shards=shards,
        order=sample_order,
        packed=packed,
        targets=targets,
        guards=guards,
        guard_notes=[f"note: eval.guard: {error}" for error in errors],
        best=best,
    )


def build_model(
    config: Config, shape: Architecture, data: RunData, newest: Path | None
) -> tuple[CLIP, list[str]]:
    """Build the model that training starts with, on the CPU, and lock what is not trained.

    A run that resumes keeps the preprocessing of its newest checkpoint. Also returns notes about weights that are
    not used.
    """
    notes: list[str] = []
    first_model = partial(build.first_model, config, shape, checkpoint=newest, add_note=notes.append)
    if config.sharding == "none" or not shape.is_native:
        model = first_model()
    else:  # rank 0 sends the weights, see ``parallel.shard``
        model = distributed.build_on_rank0(first_model, parallel.without_values)
    if newest is None:
        model.preprocess = training_data.trained_preprocess(model.preprocess, config.pixels, data.packed)
    else:
        model.preprocess = training_data.resumed_preprocess(model.preprocess, config.pixels)
    model.reset_constants()
    for target in (*data.targets, *data.guards):
        check_image(target.dataset, 0, model.preprocess)
    build.lock(model, image=config.lock.image, text=config.lock.text, terms=select_terms(config))
    world = distributed.world_size()
    check_rows(model, batch_size=config.trained_pairs, world=world, parts=config.accumulate)
    return model, notes


def open_loader(config: Config, model: CLIP, data: RunData, device: torch.device) -> loader.Loader:
    """Return the batches of this rank."""
    size = model.architecture.vision.image_size
    length = model.architecture.text.context_length
    rank = distributed.rank()
    return loader.Loader(
        shards=data.shards,
        order=data.order,
        image_size=size,
        tokenize=model.tokenizer,
        augmentation=augment.Augmentation.of(config.data, interpolation=model.preprocess.interpolation),
        decoding=model.preprocess.decoding,
        rank=rank,
        world_size=distributed.world_size(),
        num_workers=config.data.workers,
        pin_memory=device.type == "cuda",
        decode_later=config.data.nvjpeg,
        stages=small_stages(config.small, image_size=size, context_length=length),
        patches=model.architecture.vision.budget,
        teacher=training_data.teacher_features(config.distill, data.shards, rank0=rank == 0),
        text_dropout=config.data.text_dropout,
        lists_words=any(term.reads_words for term in select_terms(config).values()),
    )


def store_backbone_features(
    config: Config, model: CLIP, train_loader: loader.Loader, *, bf16: bool
) -> loader.Loader:
    """With ``lock.store``, return a loader of features of locked backbones, which are computed first."""
    if not config.lock.store:
        return train_loader
    if distributed.count_hosts() > 1:
        raise ConfigError("lock.store = true is for one machine: each would encode all samples")
    backbones = LockedBackbones(model=model, bf16=bf16)
    store = FeatureStore(
        shards=train_loader.shards,
        image_size=train_loader.image_size,
        augmentation=train_loader.augmentation,
        decoding=train_loader.decoding,
        seed=config.seed,
        backbones=backbones.identify(config.lock),
        images=config.lock.stores("image"),
        texts=config.lock.stores("text"),
        views=config.lock.views,
    )
    distributed.allow_long_waits()
    store.write(
        backbones.encode_images,
        backbones.encode_texts,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        workers=config.data.workers,
    )
    distributed.broadcast_bytes(b"")  # wait for the parts of all ranks
    distributed.end_long_waits()
    return replace(train_loader, backbone=store.open())


def resume(
    config: Config,
    newest: Path,
    fresh: checkpoint.LoopState,
    model: CLIP,
    optimizer: Optimizer,
    averaged: ema.AveragedWeights | None,
    objective_state: ObjectiveState,
    *,
    partly: bool,
) -> checkpoint.LoopState:
    """Load weights, the optimizer's and the objective's state from a checkpoint, and return the state of the loop.

    ``fresh`` is the state of a new run with this data and teacher, which must be those of the checkpoint.
    """
    run = Path(config.out)
    state = checkpoint.load_training(
        newest, model, optimizer, averaged, partly=partly, objective_state=objective_state.tensors
    )
    if state.data != fresh.data:
        raise training_data.other_data(run, f"fingerprint {fresh.data}, it was {state.data}")
    if state.teacher not in ("", fresh.teacher):
        raise training_data.other_teacher(run, config.distill)
    return replace(state, teacher=fresh.teacher)


def open_writer(config: Config, compute: TrainingStep, newest: Path | None) -> checkpoint.CheckpointWriter:
    """Return the writer of the run's checkpoints, of which ``newest`` is the newest so far."""
    return checkpoint.CheckpointWriter(
        Path(config.out),
        to_toml(config),
        keep=config.checkpoint.keep,
        newest=newest,
        objective_state=compute.state.tensors,
    )


def replay_step(
    model: CLIP, compute: TrainingStep, train_loader: loader.Loader, step: int, device: torch.device
) -> list[str]:
    """Repeat the step after ``step`` updates in one process, and return what is not finite."""
    batch = train_loader.on_device(train_loader.batch(step), step, device)
    batch = compute.select_pairs(model, batch, step)
    return guards.replay(model, compute, batch, step, train_loader.names(batch.ids))


def open_scorer(
    config: Config,
    model: CLIP,
    averaged: ema.AveragedWeights | None,
    data: RunData,
    log: Log,
    *,
    bf16: bool,
    step: int,
) -> Scorer:
    """Return the scorer of the model during its training, which continues after ``step`` steps."""
    world = distributed.world_size()
    if distributed.rank() == 0:
        data.best.add_results(Path(config.out) / "results.jsonl", until=step)
    return Scorer(
        model=model,
        datasets=data.datasets,
        run=Path(config.out),
        ranks=Ranks(rank=distributed.rank(), world=world, gather=distributed.sum_over_ranks),
        batch_size=config.eval.batch_size,
        bf16=bf16,
        dims=config.loss.dims,
        print_line=log.print_line,
        write_scores=log.write_scores,
        note_traits=log.note_traits,
        as_scored=partial(build.scored_weights, model, averaged, reshard=config.reshard),
        locked=build.locked_backbones(model, config.lock),
        metrics={target.dataset.name: target.metrics for target in data.targets},
        best=distributed.gather_objects(data.best)[0],
    )


def scores_at_start(config: Config, step: int) -> bool:
    """Whether a run that starts or resumes at a step scores it, unless it has.

    A stopped run has not scored its last step. Before step 1, weights from elsewhere are scored, and what
    ``checkpoint.best`` compares.
    """
    from_elsewhere = bool(config.model.weights or config.checkpoint.best)
    return training.is_due(step, config.eval.every_steps) or (step == 0 and from_elsewhere)


def judge(
    config: Config,
    shape: Architecture,
    data: RunData,
    log: Log,
    *,
    step: int,
    bf16: bool,
    device: torch.device,
) -> None:
    """Compare a fine-tune with its start weights and print the verdict; rank 0 alone calls this."""
    if not config.is_fine_tune or not (config.eval.guard or config.checkpoint.best):
        return
    run = Path(config.out)
    log.print_line("comparing the checkpoints and interpolations with the start weights")
    path = Path(config.model.weights).expanduser()
    tune = FineTune(
        run=run,
        weights=config.model.weights,
        architecture=config.model.name if path.is_file() else "",
        load_start=partial(build.load_start_weights, config, shape),
        last=checkpoint.step_folder(run, step),
        best=best_checkpoint(run) if config.checkpoint.best else None,
        checkpoints=count_scored_steps(run, data.best.dataset) if config.checkpoint.best else 1,
    )
    try:
        with distributed.alone():
            verdict = judge_fine_tune(
                tune,
                data.held_out,
                data.guards,
                metric=data.best.metric,
                batch_size=config.eval.batch_size,
                bf16=bf16,
                device=device,
            )
    except ClipkitError as error:  # such as start weights that were moved since; the model is trained
        log.print_line(f"no verdict: {error}")
        return
    for line in format_verdict(verdict):
        log.print_line(line)


def conclude(
    config: Config,
    shape: Architecture,
    data: RunData,
    best: BestScore,
    log: Log,
    *,
    step: int,
    bf16: bool,
    device: torch.device,
) -> None:
    """Print the verdict and the best score of a complete run, and write its report; rank 0 alone calls this."""
    run = Path(config.out)
    judge(config, shape, data, log, step=step, bf16=bf16, device=device)
    for line in best.describe(step, run, steps=config.steps):
        log.print_line(line)
    log.print_line(f"done: {build_report(run)}")


def main(arguments: Arguments) -> int:
    # 1. This process among the others, and its device.
    stop = stopping.StopRequest()
    stopping.end_with_launcher(PARENT, stop)
    distributed.check_launch()
    device = distributed.start()
    if device.type == "cpu":
        apply_cpu_settings()
    rank0 = distributed.rank() == 0

    # 2. The configuration, which is immutable from here on.
    config = load_config(Path(arguments.config), arguments.overrides, count_epoch=count_epoch)
    run = Path(config.out)
    if arguments.dry_run:
        lines = costs.dry_run(config, device, arguments.target)
        if rank0:
            print(*lines, sep="\n")
        distributed.stop()
        return 0
    build.check_split(config, world=distributed.world_size())
    if config.data.nvjpeg:
        augment.require_nvjpeg(device)
    bf16 = costs.computes_in_bf16(config.precision, device)

    # 3. The run folder, locked, and of this configuration.
    with checkpoint.only_trainer_of(run, config, rank0=rank0, launcher=stopping.launcher_of(PARENT)):
        newest = checkpoint.newest_checkpoint(run)
        if arguments.replay and newest is None:
            raise ConfigError(f"--replay requires a saved run: there is no checkpoint in {run}")
        shape = build.select_shape(config, newest=newest)

        # 4. The data for training and evaluation, checked before anything is computed.
        data = open_data(config, shape, resumed=newest is not None)

        # 5. The model, from the inside out, the optimizer, the computation of a step, and the batches.
        model, notes = build_model(config, shape, data, newest)
        terms = select_terms(config)
        sharding = "none" if arguments.replay else config.sharding  # a replay runs in one process
        model = parallel.prepare(model, config, device, sharding=sharding, bf16=bf16, terms=terms)
        optimizer = optim.make_optimizer(model, config.optim)
        averaged = ema.AveragedWeights(model, config.optim.average) if config.optim.average else None
        after = {name: term.after for name, term in terms.items()}
        unfreezing = build.Unfreezing(model, config.lock, after=after)
        compute = TrainingStep.from_config(
            config, shape, model, data.first_samples, samples=len(data.shards), bf16=bf16, averaged=averaged
        )
        train_loader = open_loader(config, model, data, device)
        distributed.broadcast_bytes(b"")  # wait for rank 0, which may have read many files

        # 6. Resume. The state of the loop is what ``LoopState`` lists, and nothing else.
        taught_by = compute.teacher or train_loader.teacher
        fingerprint = "" if taught_by is None else taught_by.fingerprint
        state = checkpoint.LoopState(step=0, data=data.shards.fingerprint(), teacher=fingerprint)
        if newest is not None:
            partly = unfreezing.has_locked_layers
            state = resume(config, newest, state, model, optimizer, averaged, compute.state, partly=partly)
        unfreezing.lock_for_step(state.step)
        train_loader = store_backbone_features(config, model, train_loader, bf16=bf16)
        if arguments.replay:
            print(*replay_step(model, compute, train_loader, state.step, device), sep="\n")
            return 0

        # 7. The loop: first what observes it.
        if rank0:
            print(redact_settings(config), file=sys.stderr)
        decoding = model.preprocess.decoding
        opening = [
            describe_model(model, device=device, bf16=bf16),
            *data.describe(config, resumed=newest is not None),
            str(decoding),
            *notes,
            *train_loader.notes,
            *describe_start(config, state.step, newest),
            *data.list_notes(config, step=state.step, layers=unfreezing.layers),
        ]
        log = Log(config, state, opening, device=device, decoding=decoding, profile=arguments.profile)
        log.list_truncated(data.shards.manifest.truncated_shards())
        scorer = open_scorer(config, model, averaged, data, log, bf16=bf16, step=state.step)
        writer = open_writer(config, compute, newest)
        comparison = guards.WeightComparison(model, every=config.checkpoint.compare_every_steps)
        decisions = guards.Decisions(
            state.usual_norm, state.updates, device=device, factor=config.optim.skip_above
        )
        statistics = ema.RunningStatistics(model)
        trained = parallel.replicated(model)
        log.count_flops(model, compute, state.step)
        batches = loader.DeviceBatches(train_loader, state.step, config.steps, device)
        step = state.step
        stopped = False
        try:
            distributed.allow_long_waits()
            if scores_at_start(config, step):
                scorer.score_if_owed(step)
            stop.save_on_signal(writer.saved_step)
            log.leave_out()  # what happened before the first step
            while step < config.steps and not (stopped or scorer.best.is_exhausted):
                # 7a. The next batch, prefetched, and a message about it to all ranks, which is read in 7d. A rank
                # whose batch has a fault computes a loss that is not a number. Only rank 0's clock counts.
                stop.begin_step()
                log.watch.begin("data")
                batch = next(batches)
                log.add_bad_samples(step + 1, batch.bad)
                totals = distributed.start_totals(
                    **batch.counts,
                    asked_to_stop=stop.number > 0,
                    time_to_save=rank0 and 0 < config.checkpoint.every_minutes <= writer.minutes_since_save,
                )
                if changed := unfreezing.lock_for_step(step):
                    del trained
                    trained = parallel.replicated(model)
                if changed or any(0 < term.after == step for term in terms.values()):
                    log.count_flops(model, compute, step)

                # 7b. The gradient of the global batch, or of the pairs chosen of it, clipped.
                rate = training.learning_rate(step, config.steps, config.optim)
                optim.set_learning_rate(optimizer, rate)
                optimizer.zero_grad(set_to_none=True)
                if statistics or config.optim.sam or compute.swaps(step):
                    writer.wait_until_copied()
                statistics.keep()
                batch = compute.select_pairs(trained, batch, step, log.watch)
                features = compute.gradients(trained, batch, step, log.watch)
                log.watch.begin("data")
                batches.prefetch()  # while a GPU computes
                log.watch.begin("backward")
                parallel.complete_gradients(model)
                if config.optim.sam:
                    with optim.perturbed_weights(model, config.optim.sam):
                        compute.gradients(trained, batch, step, log.watch)
                        parallel.complete_gradients(model)
                norm = parallel.clip_gradients(model, config.optim.clip_norm)

                # 7c. One update, unless a value is not finite or the gradient is a spike, which all ranks decide
                # alike and without waiting for the device.
                log.watch.begin("optimizer")
                skip = decisions.skip_update(features.loss, norm)
                writer.wait_until_copied()
                optim.make_update(optimizer, config.optim.name, skip=skip)
                compute.finish_update(model, skip=skip)
                statistics.put_back(where=skip)
                if averaged is not None:
                    averaged.update(decisions.updates, skip=skip)
                step += 1
                decisions.add(totals, batch.ids)

                # 7d. What the steps came to. On a GPU that is known two steps later, and not waited for unless
                # something is due after this step.
                log.watch.begin("agreement")
                last = step == config.steps
                due_score = training.is_due(step, config.eval.every_steps) and not last
                due_save = last or training.is_due(step, config.checkpoint.every_steps)
                due_metrics = log.is_due(step) or due_score or due_save
                while (outcome := decisions.next_outcome(wait=due_metrics)) is not None:
                    ranks = outcome.totals
                    state = replace(state, seconds=log.seconds)
                    if not outcome.is_finite:
                        stop.finish_step(agreed=True)
                        decisions.wait_for_messages()
                        failure = guards.diagnose_failed_step(
                            config, outcome, batch.fault, step=state.step, names=train_loader.names
                        )
                        if state.step or not ranks["faults"]:
                            distributed.allow_long_waits()
                            writer.save_now(model, optimizer, state, averaged)
                        raise failure
                    state = state.next(
                        ranks, seconds=state.seconds, is_spike=outcome.is_spike, usual_norm=outcome.usual_norm
                    )
                    log.record_step(state, loss=outcome.loss, grad_norm=outcome.norm)
                    stopped = stopped or ranks["asked_to_stop"] > 0 or log.bad_samples.exceeds_limit(state)
                    due_save = due_save or stopped or ranks["time_to_save"] > 0
                    due_metrics = due_metrics or due_save
                stop.finish_step(agreed=stopped)
                comparison.finish_step(step, now=due_save or due_score)
                log.watch.begin("other")
                log.count_batch(batch, compute.compare_pairs(batch, features))
                writer.finish_if_done()
                stop.save_on_signal(writer.saved_step)

                # 7e. Metrics.
                if due_metrics:
                    figures = {
                        "epoch": data.order.epoch(step - 1),
                        **compute.figures(batch, features),
                        "scale": model.logit_scale.exp().item(),
                        "lr": rate,
                        "truncated_shards": len(data.shards.manifest.truncated),
                        "transfer_time": batches.seconds().transfer,
                    }
                    log.write(figures, write_samples=due_score or due_save)

                # 7f. Scores on held-out data, by all ranks together; then a checkpoint. Ranks wait long for rank 0
                # only until all are done; in the next steps, a rank that hangs is noticed soon.
                if due_score or due_save:
                    distributed.allow_long_waits()
                if due_score and not stopped:
                    scorer.score(step)
                    due_save = due_save or scorer.best.is_exhausted or scorer.best.step == step
                if due_save:
                    writer.begin(model, optimizer, state, averaged, best=scorer.best.step)
                    if last or stopped or scorer.best.is_exhausted:
                        writer.finish()
                if due_score or due_save:
                    log.leave_out()
                distributed.end_long_waits()

            # 8. The end: the last scores and the report, unless a signal arrived during the last step.
            distributed.allow_long_waits()
            stopped = stopped or bool(distributed.max_over_ranks(torch.tensor(stop.number)))
            if not stopped:
                stop.exit_on_signal("all steps are saved; the same command scores and reports")
                scorer.score_if_owed(step)
                writer.mark_best(scorer.best.step)
        finally:
            batches.close()
            log.close()
            writer.close()
        if stopped:
            # waits for all ranks: a rank that exits with an error would end rank 0 while it saves
            signal_number = int(distributed.max_over_ranks(torch.tensor(stop.number)))
            log.bad_samples.check(state)
        log.print_data_summary(context_length=shape.text.context_length)
        if stopped:
            is_trained = step == config.steps or scorer.best.is_exhausted
            log.print_line(stopping.describe_stop(step, config.steps, trained=is_trained))
        elif rank0:
            conclude(config, shape, data, scorer.best, log, step=step, bf16=bf16, device=device)
    distributed.stop()
    return 128 + signal_number if stopped else 0


if __name__ == "__main__":
    run_command(distributed.together(partial(main, arguments)))
