"""The program of a process that tokenizes records for another process (see `fledge.data.tokenize`)."""

from __future__ import annotations

import os
import pickle
import sys

from fledge.data.tokenize import Batch, Settings, tokenize


def work() -> None:
    """Reads the settings and then batches of records from standard input, until it ends, and answers each batch on
    standard output: with the result, or with the error message of a record that was refused."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get into the answers
    settings: Settings = pickle.load(sys.stdin.buffer)
    while True:
        try:
            records = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Batch | str
        try:
            answer = tokenize(records, settings)
        except ValueError as e:
            answer = str(e)
        try:
            pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:  # the process that asked is gone
            os._exit(0)


if __name__ == "__main__":
    work()
