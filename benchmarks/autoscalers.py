"""The rules of Ray Serve, Kubernetes and KEDA for the number of workers, to compare Weir's with.

They are written from their sources and documentation (Ray 2.60: serve/autoscaling_policy.py; Kubernetes:
pkg/controller/podautoscaler; KEDA 2.16). Where they depend on a cluster, the simulation is kind to them: their metrics
come at once, they see all requests, and every worker that they ask for is placed. All rules have the same batcher.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from math import ceil
from typing import Any

from weir.config import parse_duration
from weir.errors import SettingsError
from weir.policy.scaling import WorkerRange
from weir.simulation.scaling import Autoscaler, WorkerLoad


@dataclass(frozen=True)
class RayOptions:
    """The options of Ray Serve's rule that are tuned, with its defaults. Durations are in seconds."""

    target: float = 2.0  # target_ongoing_requests
    upscale: float = 30.0  # upscale_delay_s
    downscale: float = 600.0  # downscale_delay_s
    look_back: float = 30.0  # look_back_period_s


class RayAutoscaler:
    """Ray Serve's rule: requests that wait or run, averaged over the look-back period, divided by the target.

    A change is made when every decision during the delay has wanted one in its direction. From 0 to 1 there is no
    delay.
    """

    period = 0.1  # CONTROL_LOOP_INTERVAL_S

    def __init__(self, allowed: WorkerRange, options: RayOptions) -> None:
        self._allowed = allowed
        self._options = options
        self._past: deque[tuple[float, float]] = deque()  # instants, and the rows' seconds until then
        self._decisions = 0  # in a row that wanted more; below 0, fewer

    def decide(self, load: WorkerLoad) -> int:
        """Return what the rule decides."""
        present, ongoing = load.present, self._ongoing(load)
        if not present:
            return 1 if load.seen.waiting else 0
        wanted = self._allowed.clip(ceil(ongoing / self._options.target))
        wanted = max(wanted, 1) if present > 1 else wanted
        if wanted == present:
            self._decisions = 0
            return present
        sign, delay = (1, self._options.upscale) if wanted > present else (-1, self._options.downscale)
        self._decisions = sign if self._decisions * sign < 0 else self._decisions + sign
        if abs(self._decisions) <= int(delay / self.period):
            return present
        self._decisions = 0
        return wanted

    def _ongoing(self, load: WorkerLoad) -> float:
        now, past = load.seen.now, self._past
        past.append((now, load.rows_seconds))
        while len(past) > 1 and past[1][0] <= now - self._options.look_back:
            past.popleft()
        seconds = now - past[0][0]
        return (load.rows_seconds - past[0][1]) / seconds if seconds else load.seen.waiting + load.rows_running


SYNC = 15.0  # seconds, --horizontal-pod-autoscaler-sync-period
TOLERANCE = 0.1  # --horizontal-pod-autoscaler-tolerance


class _PodAutoscaler:
    """What Kubernetes does with the number of replicas that a metric asks for.

    At most as many are added as there are, or 4; fewer are only taken when no decision during the stabilisation window
    wanted more.
    """

    period = SYNC

    def __init__(self, allowed: WorkerRange, stabilisation: float) -> None:
        self._allowed = allowed
        self._stabilisation = stabilisation
        self._past: deque[tuple[float, int]] = deque()

    def _stabilised(self, now: float, present: int, wanted: int) -> int:
        wanted = self._allowed.clip(min(wanted, max(2 * present, present + 4)))
        self._past.append((now, wanted))
        while self._past[0][0] < now - self._stabilisation:
            self._past.popleft()
        return wanted if wanted >= present else min(present, max(each for _, each in self._past))


@dataclass(frozen=True)
class HpaOptions:
    """The options of Kubernetes' rule that are tuned, with its defaults."""

    target: float = 0.8  # averageUtilization
    stabilisation: float = 300.0  # behavior.scaleDown.stabilizationWindowSeconds


class HpaAutoscaler(_PodAutoscaler):
    """Kubernetes' HorizontalPodAutoscaler on the workers' utilisation, the busy share since its last decision."""

    def __init__(self, allowed: WorkerRange, options: HpaOptions) -> None:
        super().__init__(allowed, options.stabilisation)
        self._target = options.target
        self._before = (0.0, 0.0)  # the last instant, and the busy seconds until then

    def decide(self, load: WorkerLoad) -> int:
        """Return what the rule decides."""
        now, ready, present = load.seen.now, max(load.seen.ready, 1), load.present
        seconds, busy = now - self._before[0], load.busy_seconds - self._before[1]
        self._before = now, load.busy_seconds
        ratio = min(busy / seconds / ready, 1.0) / self._target if seconds else 1.0
        pods = ready
        if load.seen.starting and ratio > 1.0:  # pods that are not ready count as idle, but do not turn the decision
            pods = present
            ratio = max(ratio * ready / pods, 1.0)
        wanted = present if abs(1.0 - ratio) <= TOLERANCE else ceil(ratio * pods)
        return self._stabilised(now, present, wanted)


@dataclass(frozen=True)
class KedaOptions:
    """The options of KEDA's rule that are tuned, with its defaults. Durations are in seconds."""

    target: float = 5.0  # the trigger's threshold: rows waiting for each worker
    stabilisation: float = 300.0  # advanced.horizontalPodAutoscalerConfig.behavior
    cooldown: float = 300.0  # cooldownPeriod: without rows waiting, until there is no worker
    polling: float = 30.0  # pollingInterval, which matters while there is no worker


class KedaAutoscaler(_PodAutoscaler):
    """KEDA's rule on the length of the queue: Kubernetes' for an external metric, and from 0 to 1 and back its own."""

    def __init__(self, allowed: WorkerRange, options: KedaOptions) -> None:
        super().__init__(allowed, options.stabilisation)
        self._options = options
        self._active = self._polled = 0.0  # instants

    def decide(self, load: WorkerLoad) -> int:
        """Return what the rule decides."""
        now, waiting, present = load.seen.now, load.seen.waiting, load.present
        if waiting:
            self._active = now
        if not present:
            if now - self._polled < self._options.polling:
                return 0
            self._polled = now
            return 1 if waiting else 0
        self._polled = now
        if not waiting and not self._allowed.least and now - self._active >= self._options.cooldown:
            return 0
        ratio = waiting / (self._options.target * present)
        wanted = present if abs(1.0 - ratio) <= TOLERANCE else ceil(waiting / self._options.target)
        return max(self._stabilised(now, present, wanted), 1)


_OPTIONS: Mapping[str, type[Any]] = {"ray": RayOptions, "hpa": HpaOptions, "keda": KedaOptions}
_RULES: Mapping[str, Callable[..., Autoscaler]] = {"ray": RayAutoscaler, "hpa": HpaAutoscaler, "keda": KedaAutoscaler}


def parse_autoscaler(text: str, allowed: WorkerRange) -> Autoscaler:
    """Return the rule that `text` names: ray:target=2,upscale=30s, hpa:target=0.8 or keda:target=5.

    Raises SettingsError naming the text, the option and the rule.
    """
    name, _, rest = text.partition(":")
    if name not in _OPTIONS:
        raise SettingsError(
            f"scaling={text!r}: must be one of {', '.join(_OPTIONS)}, with options as in ray:target=4,upscale=5s"
        )
    kind = _OPTIONS[name]
    known = [declared.name for declared in fields(kind) if declared.default is not MISSING]
    options = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in known:
            raise SettingsError(f"scaling={text!r}: {key!r} is not an option of {name}; there are {', '.join(known)}")
        options[key] = _number(text, key, value)
    return _RULES[name](allowed, kind(**options))


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value) if key == "target" else parse_duration(value)
    except ValueError:
        number = -1.0
    if number < 0.0 or (key == "target" and not number > 0.0):
        rule = "a number greater than 0" if key == "target" else "a duration of 0 or more, such as 30s"
        raise SettingsError(f"scaling={text!r}: {key}={value} must be {rule}")
    return number
