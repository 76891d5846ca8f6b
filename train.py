"""Train a CLIP model: ``torchrun train.py [CONFIG.toml] [key=value …]``, or ``python train.py`` for one process.

Read from top to bottom in the order of execution: build, resume, loop, evaluate, save. The same command again
resumes a run where it stopped, with bit-identical weights, as if it had never stopped. With more ``steps`` it
continues beyond the run's end, at the learning rate that the longer run has there.
"""

import math
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from clipkit.errors import DataError, report_errors, run_command
from clipkit.options import Arguments, parse_arguments

PARENT = os.getppid()  # read before torch is imported, which takes seconds: torchrun may die in the meantime

# Waiting threads must not spin: where loader processes share the cores, a step then takes up to five times as long.
# Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C while torch is imported
    with report_errors():
        arguments = parse_arguments()  # --help and errors need no torch

import torch

from clipkit import distributed, training
from clipkit.batch import Batch
from clipkit.config import load_config, redact_settings, to_toml
from clipkit.objectives import select_terms
from clipkit.training import build, checkpoint, costs, ema, guards, optim, parallel, sam
from clipkit.training.decisions import Decisions
from clipkit.training.log import Log, describe_model, describe_start
from clipkit.training.ranks import WeightComparison
from clipkit.training.step import TrainingStep, check_rows
from data import augment, loader, order, training_data
from data.loader import small_stages
from eval import Members, Ranks, Scorer, check_image, check_tasks, find_targets
from eval.report import build_report


def main(arguments: Arguments) -> int:
    # 1. This process among the others, and its device.
    stop = guards.StopRequest()
    guards.end_with_launcher(PARENT, stop)
    distributed.check_launch()
    device = distributed.start()
    rank, world = distributed.rank(), distributed.world_size()
    rank0 = rank == 0

    # 2. The configuration, which is immutable from here on.
    config = load_config(Path(arguments.config), arguments.overrides)
    run = Path(config.out)
    if arguments.dry_run:
        costs_lines = costs.dry_run(config, device, arguments.target)
        if rank0:
            print(*costs_lines, sep="\n")
        distributed.stop()
        return 0
    if arguments.replay:
        config = replace(config, accumulate=guards.replay_parts(run, config.accumulate, config.batch_size))
    shape = build.select_shape(config)
    build.check_split(config.batch_size, world=world, parts=config.accumulate)
    if config.data.nvjpeg:
        augment.require_nvjpeg(device)
    bf16 = costs.computes_in_bf16(config.precision, device)

    # 3. The run folder, locked, and of this configuration.
    with checkpoint.only_trainer_of(run, config, rank0=rank0, launcher=guards.launcher_of(PARENT)):
        # 4. The data for training and evaluation, checked before anything is computed.
        newest = checkpoint.newest_checkpoint(run)
        recorded, broadcast = checkpoint.manifest_file(run), distributed.broadcast_bytes
        shards = training_data.open_training_data(
            config.data, recorded, rank0=rank0, resumed=newest is not None, broadcast=broadcast
        )
        packed = training_data.packed_images(
            config.data, config.pixels, shards.manifest, rank0=rank0, broadcast=broadcast
        )
        members = Members(image=config.data.image, captions=config.data.captions, optional=True)
        datasets = [target.dataset for target in find_targets(config.eval.data, members=members)]
        for dataset in datasets:
            check_tasks(dataset, classes=shape.text.classes)
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
        )

        # 5. The model, from the inside out, the optimizer, and the batches.
        first_lines: list[str] = []
        model = build.first_model(config, shape, checkpoint=newest, say=first_lines.append)
        if newest is None:  # otherwise the checkpoint's
            model.preprocess = training_data.trained_preprocess(model.preprocess, config.pixels, packed)
        else:
            model.preprocess = training_data.resumed_preprocess(model.preprocess, config.pixels)
        model.reset_constants()
        for dataset in datasets:
            check_image(dataset, 0, model.preprocess)
        terms = select_terms(config)
        build.lock(model, image=config.lock.image, text=config.lock.text, terms=terms)
        check_rows(model, batch_size=config.batch_size, world=world, parts=config.accumulate)
        sharding = "none" if arguments.replay else config.sharding  # a replay runs in one process
        model = parallel.prepare(model, config, device, sharding=sharding, bf16=bf16, terms=terms)
        optimizer = optim.make_optimizer(model, config.optim)
        averaged = ema.AveragedWeights(model, config.optim.average) if config.optim.average else None
        after = {name: term.after for name, term in terms.items()}
        unfreezing = build.Unfreezing(model, every=config.lock.unfreeze_every, after=after)
        compute = TrainingStep.from_config(config, shape, model, bf16=bf16, averaged=averaged)
        size, length = shape.vision.image_size, shape.text.context_length
        train_loader = loader.Loader(
            shards=shards,
            order=sample_order,
            image_size=size,
            tokenize=model.tokenizer,
            augmentation=augment.Augmentation.of(config.data),
            decoding=model.preprocess.decoding,
            rank=rank,
            world_size=world,
            num_workers=config.data.workers,
            pin_memory=device.type == "cuda",
            decode_later=config.data.nvjpeg,
            stages=small_stages(config.small, image_size=size, context_length=length),
            teacher=training_data.teacher_features(config.distill, shards, rank0=rank0),
        )
        distributed.broadcast_bytes(b"")  # wait for rank 0, which may have read many files

        # 6. Resume. The state of the loop is what ``LoopState`` lists, and nothing else.
        taught_by = compute.teacher or train_loader.teacher
        fingerprint = taught_by.fingerprint if taught_by is not None else ""
        state = checkpoint.LoopState(step=0, data=shards.fingerprint(), teacher=fingerprint)
        planned = config.steps
        if newest is not None:
            stored = checkpoint.load_training(newest, model, optimizer, averaged, partly=unfreezing.wanted)
            if stored.data != state.data:
                raise training_data.other_data(run, f"fingerprint {state.data}, it was {stored.data}")
            if stored.teacher not in ("", fingerprint):
                raise training_data.other_teacher(run, config.distill)
            drawn = stored.step * config.batch_size
            guards.check_bad_samples(stored.bad_samples, drawn, config.data.max_bad, run)
            state = replace(stored, teacher=fingerprint)
            planned = checkpoint.planned_steps(newest, otherwise=config.steps)
        # Lines that a killed run wrote after its last checkpoint will be written again.
        if rank0 and not arguments.replay:
            guards.drop_bad_samples_after(run, state.step)
            guards.drop_lines_after(run / "results.jsonl", state.step)
        distributed.barrier()  # no rank writes before that is done
        unfreezing.lock_for_step(state.step)
        trained = parallel.replicated(model)
        if arguments.replay:
            repeated = train_loader.on_device(train_loader.batch(state.step), state.step, device)
            names = train_loader.names(repeated.ids)
            print(*guards.replay(model, compute, repeated, state.step, names), sep="\n")
            return 0

        # 7. The loop: first its log.
        if rank0:
            print(redact_settings(config), file=sys.stderr)
        notes = guards.list_truncated(run, shards.manifest.truncated_shards()) if rank0 else []
        notes += packed.notes if newest is None else checkpoint.damaged_notes(newest)
        samples = [f"{sample_order.samples} samples", shards.manifest.left_out(shards.selection)]
        order_line = sample_order.describe(config.steps, config.data.redacted_sources)
        opening = [
            describe_model(model, world=world, device=device, bf16=bf16),
            f"{', '.join(filter(None, samples))}; {order_line}",
            str(model.preprocess.decoding),
            *first_lines,
            *describe_start(run, state.step, config.steps, planned, config.optim),
            *config.notes(
                step=state.step,
                samples=sample_order.samples,
                layers=unfreezing.layers,
                hosts=max(1, world // distributed.ranks_of_host()),
            ),
            *notes,
        ]
        decoding = model.preprocess.decoding
        log = Log(config, state, device=device, decoding=decoding, opening=opening, profile=arguments.profile)
        scorer = Scorer(
            model=model,
            datasets=datasets,
            run=run,
            ranks=Ranks(rank=rank, world=world, gather=distributed.sum_over_ranks),
            batch_size=config.eval.batch_size,
            bf16=bf16,
            dims=config.loss.dims,
            say=log.print_line,
            record=log.write_scores,
            note=log.note_traits,
            as_scored=partial(build.scored_weights, model, averaged, reshard=config.reshard),
        )
        writer = checkpoint.CheckpointWriter(run, to_toml(config), keep=config.checkpoint.keep, newest=newest)
        comparison = WeightComparison(model, every=config.checkpoint.compare_every_steps)
        statistics = ema.RunningStatistics(model)
        log.count_flops(model, compute, state.step)
        batches = loader.DeviceBatches(train_loader, state.step, config.steps, device)
        max_logit_scale = math.log(compute.objective.max_scale)
        decisions = Decisions(state, device=device, factor=config.optim.skip_above)
        batch: Batch | None = None
        step = state.step
        stopped = False
        began, saved_at = time.monotonic() - state.seconds, time.monotonic()
        try:
            # a stopped run has not scored its last step; weights from elsewhere are scored before step 1
            if training.is_due(step, config.eval.every_steps) or (step == 0 and config.model.weights):
                scorer.score_if_owed(step)
            stop.save_first(True, guards.loss_after(writer.saved_step))
            log.leave_out()  # what happened before the first step
            while step < config.steps and not stopped:
                # 7a. The next batch, prefetched, and a message about it to all ranks, which is read in 7d. A rank
                # whose batch has a fault computes a loss that is not a number. Only rank 0's clock counts.
                stop.begin_step()
                log.watch.begin("data")
                if batch is None or not batch.fault:
                    try:
                        batch = next(batches)
                    except DataError as error:
                        batch = train_loader.placeholder(step, error).to(device)
                    log.add_bad_samples(step + 1, batch.bad)
                minutes = (time.monotonic() - saved_at) / 60
                totals = distributed.start_totals(
                    asked_to_stop=stop.asked,
                    bad_samples=len(batch.bad),
                    time_to_save=rank0 and 0 < config.checkpoint.every_minutes <= minutes,
                    faults=bool(batch.fault),
                    cut_captions=batch.cut_captions,
                    **batch.traits.counts_by_trait,
                )
                if changed := unfreezing.lock_for_step(step):
                    del trained
                    trained = parallel.replicated(model)
                if changed or any(0 < term.after == step for term in terms.values()):
                    log.count_flops(model, compute, step)

                # 7b. The gradient of the global batch, clipped.
                rate = training.learning_rate(step, config.steps, config.optim)
                for group in optimizer.param_groups:
                    group["lr"] = rate * group["lr_scale"]
                optimizer.zero_grad(set_to_none=True)
                if statistics or config.optim.sam or compute.swaps(step):
                    writer.wait_until_copied()
                statistics.keep()
                features = compute.gradients(trained, batch, step, log.watch)
                log.watch.begin("data")
                batches.prefetch()  # while a GPU computes
                log.watch.begin("backward")
                parallel.complete_gradients(model)
                if config.optim.sam:
                    with sam.perturbed_weights(model, config.optim.sam):
                        compute.gradients(trained, batch, step, log.watch)
                        parallel.complete_gradients(model)
                norm = parallel.clip_gradients(model, config.optim.clip_norm)

                # 7c. One update, unless a value is not finite or the gradient is a spike, which all ranks decide
                # alike and without waiting for the device.
                log.watch.begin("optimizer")
                skip = decisions.skip_update(features.loss, norm)
                writer.wait_until_copied()
                optim.make_update(optimizer, config.optim.name, skip=skip)
                with torch.no_grad():
                    scale = model.logit_scale
                    scale.copy_(torch.where(skip, scale, scale.clamp(0, max_logit_scale)))
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
                    if not outcome.is_finite:
                        stop.finish_step(agreed=True)
                        decisions.wait_for_messages()
                        causes = distributed.gather_objects(batch.fault if ranks["faults"] else "")
                        if not ranks["faults"]:
                            names = train_loader.names(outcome.ids)
                            guards.list_not_finite(run, names, step=state.step, rank=rank)
                        if state.step or not ranks["faults"]:
                            distributed.allow_long_waits()
                            state = replace(state, seconds=time.monotonic() - began)
                            writer.save_now(model, optimizer, state, averaged)
                        raise guards.failed_step(
                            run, state.step, causes=causes, loss=outcome.loss, norm=outcome.norm
                        )
                    state = state.next(
                        ranks,
                        seconds=time.monotonic() - began,
                        is_spike=outcome.is_spike,
                        usual_norm=outcome.usual_norm,
                    )
                    log.update(state)
                    loss, grad_norm = outcome.loss, outcome.norm
                    drawn = state.step * config.batch_size
                    too_many_bad = guards.too_many_bad(state.bad_samples, drawn, config.data.max_bad)
                    stopped = stopped or ranks["asked_to_stop"] > 0 or too_many_bad
                    due_save = due_save or stopped or ranks["time_to_save"] > 0
                    due_metrics = due_metrics or due_save
                stop.finish_step(agreed=stopped)
                comparison.finish_step(step, now=due_save)
                log.watch.begin("other")
                log.count_batch(batch)
                writer.finish_if_done()
                stop.otherwise = guards.loss_after(writer.saved_step)

                # 7e. Metrics.
                if due_metrics:
                    figures = {
                        "epoch": sample_order.epoch(step - 1),
                        "samples": drawn,
                        "loss": loss,
                        **compute.figures(batch, features),
                        "scale": model.logit_scale.exp().item(),
                        "lr": rate,
                        "grad_norm": grad_norm,
                        "truncated_shards": len(shards.manifest.truncated),
                    }
                    log.write(state, figures, transfer_time=batches.seconds().transfer)

                # 7f. Scores on held-out data, by all ranks together; then a checkpoint. Ranks wait long for rank 0
                # only until all are done; in the next steps, a rank that hangs is noticed soon.
                if due_score or due_save:
                    distributed.allow_long_waits()
                if due_score and not stopped:
                    scorer.score(step)
                if due_save:
                    writer.begin(model, optimizer, state, averaged)
                    if last or stopped:
                        writer.finish()
                    saved_at = time.monotonic()
                if due_score or due_save:
                    log.leave_out()
                distributed.end_long_waits()

            # 8. The end: the last scores and the report, unless a signal arrived during the last step.
            distributed.allow_long_waits()
            stopped = stopped or bool(distributed.max_over_ranks(torch.tensor(stop.number)))
            if not stopped:
                stop.save_first(False, "all steps are saved; the same command scores and reports")
                scorer.score_if_owed(step)
        finally:
            batches.close()
            log.close(state)
            writer.close()
        if stopped:
            # waits for all ranks: a rank that exits with an error would end rank 0 while it saves
            signal_number = int(distributed.max_over_ranks(torch.tensor(stop.number)))
            drawn = state.step * config.batch_size
            guards.check_bad_samples(state.bad_samples, drawn, config.data.max_bad, run)
        log.sum_up(state, captions=shards.selection.captions.count, context_length=length)
        if stopped:
            log.print_line(f"stopped and saved at step {step} of {config.steps}; the same command resumes")
        elif rank0:
            log.print_line(f"done: {build_report(run)}")
    distributed.stop()
    return 128 + signal_number if stopped else 0


if __name__ == "__main__":
    run_command(distributed.together(partial(main, arguments)))
