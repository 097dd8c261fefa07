import logging
import os
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from apexrl.acting.video import HARMLESS, MAX_MOVING_BYTES, VIDEOS_KEPT, VideoFolder, VideoWriter, without_lines
from apexrl.errors import ConfigError


def record(folder, name, num_pictures=3):
    recorder = VideoWriter(folder.new_path(f"{name}.webm"), 15)
    for level in range(num_pictures):
        recorder.add(np.full((32, 48, 3), 40 * level, np.uint8))
    strip = recorder.close()
    folder.take(recorder.video)
    return recorder.video, strip


def test_only_own_videos_are_removed(tmp_path):
    theirs = [tmp_path / f"game-{number:08d}.webm" for number in range(2 * VIDEOS_KEPT)]
    for path in theirs:
        path.write_bytes(b"somebody else's")
    folder = VideoFolder(tmp_path)
    ours = [record(folder, f"game-{number:08d}")[0] for number in range(VIDEOS_KEPT + 3)]
    assert all(path.read_bytes() == b"somebody else's" for path in theirs)
    assert not set(ours) & set(theirs) and len(set(ours)) == len(ours)
    assert [path.exists() for path in ours] == [False] * 3 + [True] * VIDEOS_KEPT
    assert folder.newest == ours[-1]


def test_a_video_can_be_played(tmp_path):
    path, strip = record(VideoFolder(tmp_path / "new" / "folder"), "game", 5)
    reader = cv2.VideoCapture(str(path))
    pictures = [reader.read()[1] for _ in range(5)]
    assert [picture.shape for picture in pictures] == [(64, 96, 3)] * 5 and not reader.read()[0]
    _, moving = cv2.imdecodeanimation(np.frombuffer(strip, np.uint8))
    assert [picture[0, 0, 0] for picture in moving.frames] == [0, 40, 80, 120, 160] and len(set(moving.durations)) == 2


def test_a_picture_that_moves_has_fewer_pictures_where_it_would_be_too_large(tmp_path):
    writer, noise = VideoWriter(None, 30.0), np.random.default_rng(0)
    for _ in range(200):
        writer.add(noise.integers(0, 256, (100, 200, 3), np.uint8))
    moving = writer.close()
    assert MAX_MOVING_BYTES / 4 < len(moving) <= MAX_MOVING_BYTES
    assert len(cv2.imdecodeanimation(np.frombuffer(moving, np.uint8))[1].frames) > 4


def test_pictures_of_other_sizes_become_as_large_as_the_first(tmp_path):
    writer = VideoWriter(tmp_path / "game.webm", 30.0)
    for side in (32, 48, 16):
        writer.add(np.full((side, side, 3), side, np.uint8))
    assert writer.close().startswith(b"\x89PNG")
    reader = cv2.VideoCapture(str(tmp_path / "game.webm"))
    assert [reader.read()[1].shape for _ in range(3)] == [(64, 64, 3)] * 3


@pytest.mark.parametrize(("size", "factor"), [((210, 160), 2), ((400, 600), 1), ((33, 201), 2), ((200, 200), 1)])
def test_small_pictures_are_doubled(tmp_path, size, factor):
    writer = VideoWriter(tmp_path / "game.webm", 30.0)
    writer.add(np.zeros((*size, 3), np.uint8))
    writer.close()
    assert cv2.VideoCapture(str(tmp_path / "game.webm")).read()[1].shape == (factor * size[0], factor * size[1], 3)


def test_a_video_prints_no_line_that_looks_like_an_error(tmp_path, capfd):
    record(VideoFolder(tmp_path), "game")
    assert capfd.readouterr().err == ""


def test_other_lines_of_standard_error_are_kept(capfd):
    with without_lines(HARMLESS):
        os.write(2, b"a game's warning\n" + HARMLESS + b" 0x30385056/'VP80'\nhalf a line")
    os.write(2, b" and its end\n")
    assert capfd.readouterr().err == "a game's warning\nhalf a line and its end\n"


def test_a_video_that_cannot_be_written_is_not_announced(tmp_path, caplog):
    folder = VideoFolder(tmp_path / "videos")
    (tmp_path / "videos").rmdir()
    with caplog.at_level(logging.WARNING):
        path, strip = record(folder, "game")
    assert path is None and folder.newest is None
    assert strip.startswith(b"\x89PNG")  # the pictures are there all the same
    assert len(caplog.records) == 1 and "no video" in caplog.text and str(tmp_path / "videos") in caplog.text


def test_a_video_in_a_directory_of_another_encoding_is_not_written(tmp_path, caplog):
    """OpenCV would end the process."""
    directory = tmp_path / os.fsdecode(b"M\xfcller")
    directory.mkdir()
    with caplog.at_level(logging.WARNING):
        path, strip = record(VideoFolder(directory), "game")
    assert path is None and strip.startswith(b"\x89PNG") and "is not UTF-8" in caplog.text


def test_a_video_of_which_the_disk_took_nothing_is_not_announced(tmp_path):
    writer = VideoWriter(tmp_path / "game.webm", 30)
    writer.add(np.zeros((32, 32, 3), np.uint8))
    writer._writer.release()
    (tmp_path / "game.webm").write_bytes(b"\x1aE")  # OpenCV writes to a full disk without an error
    assert writer.close().startswith(b"\x89PNG")
    assert writer.video is None and not list(tmp_path.iterdir())


def test_a_directory_whose_name_has_a_colon_takes_videos(tmp_path, monkeypatch):
    """FFmpeg takes what stands before the first colon of a relative path for a protocol."""
    monkeypatch.chdir(tmp_path)
    video, _ = record(VideoFolder(Path("pong:1") / "videos"), "game")
    assert video is not None and (tmp_path / video).is_file()


def test_without_pictures_there_is_no_video(tmp_path):
    folder = VideoFolder(tmp_path)
    assert record(folder, "game", num_pictures=0) == (None, b"")
    assert folder.newest is None and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_had_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"--record-dir .*file"):
        VideoFolder(tmp_path / "file")


def test_film_of_slow_pictures_is_short():
    drawn = []
    writer = VideoWriter(None, 30.0, most_seconds=0.02)

    def render():
        time.sleep(0.03)
        drawn.append(np.zeros((8, 8, 3), np.uint8))
        return drawn[-1]

    for _ in range(5):
        writer.film(render)
    assert len(drawn) == 1
    assert writer.close()  # of the picture that there was time for
