"""The last line of a process, as its supervisor tells it."""

from apexrl.running.last_words import MAX_LINE_CHARACTERS, last_line


def test_a_long_line_keeps_its_beginning_and_its_end():
    cure = "Set MLFLOW_ALLOW_FILE_STORE=true"
    line = last_line(f"12:00:00 mlflow: MlflowException: {'the file store is old. ' * 40}{cure}\n".encode())
    assert line.startswith("MlflowException: the file store") and " ... " in line and line.endswith(cure)
    assert len(line) == MAX_LINE_CHARACTERS
    assert last_line(b"x" * MAX_LINE_CHARACTERS) == "x" * MAX_LINE_CHARACTERS
