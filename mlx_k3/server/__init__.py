"""OpenAI's HTTP interface to one model: chat completions, completions, models, health, metrics.

What mlx-lm's server does for a model in general is used where it holds for this one: its samplers,
logits processors, text state machine and generation loop, and the names of the fields that a
request may have beyond OpenAI's (a test reads them from its source). Its handler is not
subclassed, because all that would be left of it are three methods that write headers:

- it reads answers as text, so that text which spells a tag opens a channel; here ids decide;
- it sends tool calls when they are over and calls the thinking ``reasoning``;
- a body's mistakes are answered in a form that OpenAI's clients do not know, and a failed
  generation with the exception's text and 404;
- it loads whatever folder a request names, and fetches whatever URL an image has;
- it notices that a client has left when it next writes: not in the queue, not in a prompt, and
  never for an answer that is sent as a whole.

These are inside the methods that parse a body, wait for the model and write the answer, each one
of which would have to be written anew. HTTP itself is left to Starlette and uvicorn.
"""
