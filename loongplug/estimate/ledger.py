"""What a rank holds at each moment of a step, by what it is, and the fullest of these moments."""

from collections import Counter

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradient buffers", "optimizer state"
ENCODER, DECODER = "encoder activations", "decoder activations"
INPUT, FEATURES, FEATURE_GRADIENTS = "media", "features", "feature gradients"
STATES, STATE_GRADIENTS = "states between stages", "gradients of these states"
PIPELINE = "pipeline buffers"
TRANSIENT = "transient"


class Ledger:
    """Bytes that come and go.

    ``peak`` is what there was at the fullest moment, ``when`` says which that was; ``most`` has
    of each kind the most that there ever was.
    """

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.when = ""
        self._fullest = -1

    def add(self, name: str, nbytes: int) -> None:
        """These are there from now on."""
        self.live[name] += nbytes
        self.most[name] = max(self.most[name], self.live[name])

    def take(self, name: str, nbytes: int) -> None:
        """These are gone."""
        self.live[name] -= nbytes
        assert self.live[name] >= 0, (name, self.live[name])

    def clear(self, name: str) -> None:
        """All of these are gone."""
        self.live[name] = 0

    def work(self, when: str, transient: int) -> None:
        """Something is done that needs ``transient`` bytes besides what there is."""
        total = self.live.total() + transient
        if total > self._fullest:
            self._fullest = total
            self.peak = {**self.live, TRANSIENT: transient}
            self.when = when
