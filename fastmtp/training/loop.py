"""A training run from its start, or from where it was stopped, to a head on disk.

Order at a step that is tried on held-out rows: save, estimate, keep the best, log. A kill between any two of these
loses nothing: the save says that the estimate is still to come. The result is taken where the held-out mean acceptance
length was best, which may be the head as it came.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

from fastmtp.config import TrainConfig
from fastmtp.data.packing import pack
from fastmtp.data.store import Rows
from fastmtp.errors import Interrupted, TrainingError
from fastmtp.plots import plot_curves
from fastmtp.progress import Reporter
from fastmtp.training.checks import SAMPLE_ROWS, count_changed, guess_cost, require_moved, require_well_read
from fastmtp.training.engine import Engine, head_of
from fastmtp.training.headfiles import HeadFiles
from fastmtp.training.loading import Loader
from fastmtp.training.metrics import EVENTS, METRICS, MetricsLog, Story, duration, flat
from fastmtp.training.plan import Plan
from fastmtp.training.saves import Estimate, Saves, State, read_tensors
from fastmtp.training.stopping import Stop, StopSignals
from fastmtp.training.world import World, whole

CURVES = "curves.png"
SAVE_SECONDS = 600.0
_FREQUENCY_ROWS = 2000
_WARM_STEPS = 3  # the first steps of a process are slower than those that follow


class Run:
    """One run; `train` is the whole of it."""

    def __init__(
        self,
        files: HeadFiles,
        rows: Rows,
        plan: Plan,
        config: TrainConfig,
        saves: Saves,
        world: World,
        reporter: Reporter,
    ) -> None:
        self._files, self._rows, self._plan, self._config = files, rows, plan, config
        self._saves, self._world, self._reporter = saves, world, reporter
        self._held_out = rows.split("holdout")
        self._stop = StopSignals(last=world.size > 1)
        self._loader = Loader(rows, plan.steps, world, config.micro_tokens)
        self._engine = Engine(files.objective(config, world.device), self._loader, config, world, self._stop)
        self._state = State(steps=len(plan.steps))
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._pace: list[float] = []

    def train(self, directory: Path) -> dict[str, Any]:
        """Train to the end and write the head, its metrics and curves into `directory`. Returns the stage's summary.

        Raises:
            TrainingError: see `fastmtp.training.checks`.
            Interrupted: a signal came; what was done is saved.
        """
        with self._loader, self._stop:
            try:
                self._begin()
                self._go()
            except Stop:
                self._save_for_stop()
        return self._finish(directory)

    def _begin(self) -> None:
        found = self._saves.last()
        if found is None:
            with self._stop.at_once():
                if not self._config.allow_untrained_head:
                    self._require_well_read()
                self._reporter.phase("trying the head as it came on held-out rows")
                self._state.estimates = [Estimate(step=0, found=self._engine.estimate(self._held_out))]
            return
        path, self._state = found
        self._saved_step = self._state.step
        self._engine.load(read_tensors(path))
        self._reporter.say(f"going on after step {self._state.step} of {self._state.steps}")

    def _go(self) -> None:
        state = self._state
        self._reporter.phase("fine-tuning the head", state.steps, "steps")
        self._reporter.advance(state.step)
        with self._story() as log:
            if state.step == 0:
                log.add(0, flat(state.best))
            if state.unlogged is not None:
                self._validate(log)
            while state.step < state.steps:
                begun, waited = time.monotonic(), self._loader.waited
                record = self._engine.step(self._plan.steps[state.step], state.step, state.steps)
                state.step += 1
                state.tokens += sum(entry.length for entry in self._plan.steps[state.step - 1])
                state.waited += self._loader.waited - waited
                self._count(time.monotonic() - begun)
                if state.step in self._plan.validate_at:
                    state.unlogged = record
                    self._save()
                    self._validate(log)
                else:
                    log.add(state.step, record)
                    if self._due():
                        log.sync()
                        self._save()

    def _validate(self, log: Story) -> None:
        state = self._state
        with self._stop.at_once():
            found = self._engine.estimate(self._held_out)
        record = (state.unlogged or {}) | flat(found)
        state.estimates.append(Estimate(step=state.step, found=found))
        state.unlogged = None
        if found.mean_acceptance_length > state.best.mean_acceptance_length:
            state.best_step = state.step
            self._saves.save("best", state, self._engine.weights())
        log.add(state.step, record)
        log.sync()
        self._saves.update(state)

    def _require_well_read(self) -> None:
        rows = self._rows.split("train")
        answered = [entry for entry in self._held_out or rows if entry.supervised >= 2]
        sample = (answered or rows)[:SAMPLE_ROWS]
        first, *_ = pack([entry.length for entry in sample], self._config.micro_tokens, range(len(sample)))
        sample = [sample[place] for place in first]
        loss, hit = self._engine.first_loss(sample)
        guess = guess_cost(
            (token for entry in rows[:_FREQUENCY_ROWS] for token in self._rows.answer_ids(entry)),
            [token for entry in sample for token in self._rows.answer_ids(entry)],
            self._files.vocabulary,
        )
        require_well_read(loss, guess, hit)

    def _save(self) -> None:
        self._saves.save("last", self._state, self._engine.state())
        self._saved_step, self._saved_at = self._state.step, time.monotonic()

    def _save_for_stop(self) -> None:
        state = self._state
        if state.estimates and self._saved_step != state.step:
            self._save()
        name = signal.Signals(self._stop.number or signal.SIGTERM).name
        raise Interrupted(
            f"Stopped by {name} after step {state.step} of {state.steps}.",
            signal_number=self._stop.number or signal.SIGTERM,
        ) from None

    def _due(self) -> bool:
        if self._config.save_every is not None:
            return self._state.step % self._config.save_every == 0
        return self._world.any(self._world.main and time.monotonic() - self._saved_at > SAVE_SECONDS)

    def _story(self) -> Story:
        log = None
        if self._world.main:
            log = MetricsLog(self._saves.root, self._state.step, tensorboard=self._config.tensorboard)
        latest = flat(self._state.estimates[-1].found)
        return Story(log, self._reporter, latest, self._seconds_left)

    def _count(self, seconds: float) -> None:
        self._state.seconds += seconds
        self._pace.append(seconds)
        if len(self._pace) == _WARM_STEPS + 3 and (left := self._seconds_left()) is not None:
            self._reporter.say(f"{duration(left)} for the {self._state.steps - self._state.step} steps left, about")

    def _seconds_left(self) -> float | None:
        recent = self._pace[_WARM_STEPS:][-20:]
        return (self._state.steps - self._state.step) * sum(recent) / len(recent) if recent else None

    def _finish(self, directory: Path) -> dict[str, Any]:
        state = self._state
        if state.step != state.steps:
            raise TrainingError(f"Only {state.step} of {state.steps} steps were done.")
        final = {key: whole(value) for key, value in self._engine.weights().items()}
        if not self._world.main:
            return {}
        last = head_of(final)
        moved = require_moved(self._files.before, last, last)
        if not self._held_out:
            tuned = last
        elif state.best_step == 0:
            tuned = {}
            self._reporter.say("no step was better on held-out rows than the head as it came, which is the result")
        else:
            tuned = head_of(read_tensors(self._saves.best(state.best_step)))
        stored = self._files.stored(tuned)
        self._files.write(stored, directory)
        self._copy_story(directory)
        return {
            "steps": state.steps, "rows": self._plan.rows, "tokens": state.tokens, **moved,
            "tensors_stored": len(stored), "tensors_changed_as_stored": count_changed(self._files.native, stored),
            "estimates": [{"step": estimate.step, **flat(estimate.found)} for estimate in state.estimates],
            "best": state.best.model_dump(), "best_step": state.best_step if self._held_out else state.steps,
            "recursion": self._config.recursion, "processes": self._world.size,
            "seconds_training": round(state.seconds, 2), "loading": round(state.waited / max(state.seconds, 1e-9), 4),
        }  # fmt: skip

    def _copy_story(self, directory: Path) -> None:
        shutil.copyfile(self._saves.root / METRICS, directory / METRICS)
        if (self._saves.root / EVENTS).is_dir():
            shutil.copytree(self._saves.root / EVENTS, directory / EVENTS)
        plot_curves(directory / METRICS, directory / CURVES, best_step=self._state.best_step)
