"""Wrong values that one run tells of together, so that there are fewer runs."""

from typing import Any

Case = tuple[Any, ...]


def rounds(cases: list[Case]) -> list[list[Case]]:
    """Returns the cases in as few lists as will do when the first item of each is different in a list."""
    made: list[list[Case]] = []
    for case in cases:
        fitting = next((one for one in made if case[0] not in {other[0] for other in one}), None)
        if fitting is None:
            made.append(fitting := [])
        fitting.append(case)
    return made
