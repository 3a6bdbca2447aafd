from weir.messages import OBJECT, Batch
from weir.workers.child_channel import Frames


def test_a_batch_goes_through_both_frames_and_comes_back_as_it_was() -> None:
    frames = Frames()
    for number in (1, 2):
        events = frames.answer(Batch(number, [3, "four", None], OBJECT, OBJECT))
        assert (events.batch_id, events.outputs, events.final) == (number, [3, "four", None], True)
    frames.rehearse()
