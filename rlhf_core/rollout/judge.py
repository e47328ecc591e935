"""A judge: a model behind an OpenAI-compatible endpoint, asked about each response. What it says is read elsewhere."""

import asyncio
import re
from collections.abc import Sequence

from rlhf_core.config.rewards import JudgeReward
from rlhf_core.rollout.http_client import JsonClient, RequestError, secret
from rlhf_core.rollout.outcomes import Failed, Response, one_line


def fill_template(template: str, response: Response) -> str:
    """{prompt}, {response} and {label} replaced, once: braces in what is put in stay as they are."""
    values = {"{prompt}": response.prompt, "{response}": response.completion, "{label}": response.label}
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], template)


class Judge:
    """For one event loop. Raises SettingsError for a key that is not set."""

    def __init__(self, settings: JudgeReward):
        self._settings = settings
        self._client = JsonClient(
            [f"{settings.url.rstrip('/')}/chat/completions"],
            token=secret("reward.judge.key_env", settings.key_env),
            concurrency=settings.concurrency,
            timeout_s=settings.timeout_s,
            attempts=settings.attempts,
        )

    async def ask(self, responses: Sequence[Response]) -> list[str | Failed]:
        """The judge's answer to each response."""
        return await asyncio.gather(*(self._ask(one) for one in responses))

    async def _ask(self, response: Response) -> str | Failed:
        body = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": fill_template(self._settings.template, response)}],
            "temperature": self._settings.temperature,
            "max_tokens": self._settings.max_tokens,
        }
        try:
            answer = await self._client.post(body)
        except RequestError as error:
            return error.failure
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            content = None
        if not isinstance(content, str):
            return Failed("unparsable", f"no choices[0].message.content in {one_line(answer, 120)}")
        return content

    async def close(self) -> None:
        await self._client.close()
