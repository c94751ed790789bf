"""LiteLLM as a library: `python litellm_client.py URL MODEL`, in LiteLLM's own environment. Prints what it
found as JSON, for test_litellm.py."""

import json
import sys

import litellm

litellm.suppress_debug_info = True  # it goes to standard output
url, model = sys.argv[1:]
options = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
question = [{"role": "user", "content": "What is the capital of France?"}]
paris = "The capital of France is Paris."

whole = litellm.completion(messages=question, temperature=0, **options)
assert whole.choices[0].message.content == paris, whole
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

chunks = list(
    litellm.completion(
        messages=question, temperature=0, stream=True, stream_options={"include_usage": True}, **options
    )
)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == paris
built = litellm.stream_chunk_builder(chunks)
assert built.usage.completion_tokens == whole.usage.completion_tokens, built

text = litellm.text_completion(prompt="One, two, three, four, five,", temperature=0, max_tokens=6, **options)
assert text.choices[0].text.startswith(" six, seven"), text

raised = []
for field in ({"temperature": -1}, {"max_tokens": 10**6}):
    try:
        litellm.completion(messages=question, **field, **options)
    except litellm.BadRequestError as error:
        raised.append(type(error).__name__)
try:
    litellm.completion(messages=question, **(options | {"model": "openai/gpt"}))
except litellm.NotFoundError as error:
    raised.append(type(error).__name__)

messages = [
    {
        "role": "system",
        "content": "You answer in one short sentence. Some facts: oak, beech and maple lose their leaves in "
        "autumn; pine, fir and spruce keep their needles in winter; larch is a conifer that loses them. "
        "Ginkgo has fan-shaped leaves that turn yellow. Birch has white bark, and alder grows beside water.",
    }
]
turns = []
for asked in (
    "Which tree has white bark?",
    "Which one grows beside water?",
    "Which conifer loses its needles?",
):
    messages.append({"role": "user", "content": asked})
    answer = litellm.completion(messages=messages, temperature=0, max_tokens=24, **options)
    messages.append(answer.choices[0].message.model_dump())
    turns.append(answer.id)
json.dump({"raised": raised, "turns": turns}, sys.stdout)
