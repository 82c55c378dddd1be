"""The file of a flight: a bound, and what outlives the process."""

from pathlib import Path

from genbatch.actors.recording.records import DrainOverRecord, RecordWriter


def test_a_record_without_room_is_told_and_not_written(tmp_path: Path) -> None:
    writer = RecordWriter(str(tmp_path / "a.flight"), max_bytes=100)
    taken = [writer.write(DrainOverRecord(time=1.0)) for _ in range(10)]
    writer.close()
    assert taken == sorted(taken, reverse=True) and taken[0] and not taken[-1]
    assert (tmp_path / "a.flight").stat().st_size <= 100


def test_what_is_flushed_is_in_the_file_while_the_writer_goes_on(tmp_path: Path) -> None:
    writer = RecordWriter(str(tmp_path / "a.flight"), max_bytes=10_000)
    writer.write(DrainOverRecord(time=1.0))
    before = (tmp_path / "a.flight").stat().st_size
    writer.flush()
    assert (tmp_path / "a.flight").stat().st_size > before
    writer.close()
