"""A server that is killed at random moments never leaves prompts that load wrongly."""

import random
import signal
import threading
import time

import openai
import pytest

from .support.server import ask, serving

QUESTIONS = ("What is 47 + 85?", "Sort: 4, 2, 9.", "Who are you?", "What is 12 * 3? " * 40)


def talk(server, seed: int) -> None:
    """Conversations until the server is gone."""
    rng = random.Random(seed)
    with server.client(timeout=60) as client:
        try:
            while True:
                messages = []
                for _ in range(3):
                    messages.append({"role": "user", "content": rng.choice(QUESTIONS)})
                    reply = client.chat.completions.create(model="k3-nano", messages=messages)
                    messages.append(reply.choices[0].message)
        except (openai.APIConnectionError, openai.InternalServerError):
            return


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_the_answers_after_kills_are_those_of_a_fresh_server(tmp_path, kills):
    with serving() as server, server.client(timeout=60) as client:
        wanted = [ask(client, text).choices[0].message.content for text in QUESTIONS]
    rng, found = random.Random(kills), 0
    for kill in range(kills):
        with serving(cache=tmp_path) as server:
            clients = [threading.Thread(target=talk, args=(server, kill * 2 + i)) for i in range(2)]
            for thread in clients:
                thread.start()
            time.sleep(rng.uniform(0.1, 2))
            assert server.end(signal.SIGKILL) == -signal.SIGKILL
            for thread in clients:
                thread.join(60)
        with serving(cache=tmp_path) as server, server.client(timeout=60) as client:
            replies = [ask(client, text) for text in QUESTIONS]
            assert [reply.choices[0].message.content for reply in replies] == wanted
            found += sum(reply.usage.prompt_tokens_details.cached_tokens > 0 for reply in replies)
            assert "Traceback" not in server.log
    assert found  # prompts of killed servers were used
