"""``--device`` is read before all other flags."""

import pytest

from loongplug.platform import requested_device

pytestmark = pytest.mark.quick


def test_device_is_read_ahead_of_all_else() -> None:
    assert requested_device([]) == "auto"
    assert requested_device(["--foo", "1", "--device", "cpu", "a.b=c"]) == "cpu"
    assert requested_device(["--device=cuda"]) == "cuda"
    assert requested_device(["--device=cuda", "--save", "x", "--device", "cpu"]) == "cpu"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--device", "tpu"), "^--device: invalid choice: 'tpu'"),
        (("--device",), "^--device: expected one argument"),
    ],
)
def test_what_is_no_device_is_refused(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        requested_device(flags)
