"""A reward service in OpenRLHF's protocol: {query, prompts, labels} in, {rewards, scores, extra_logs} back."""

import asyncio
from collections.abc import Sequence

from rlhf_core.config.rewards import HttpReward
from rlhf_core.rollout.http_client import JsonClient, RequestError, secret
from rlhf_core.rollout.outcomes import Failed, Outcome, Response, finite, one_line
from rlhf_core.rollout.reward_functions import read_result


class HttpRewards:
    """Scores responses in batches. For one event loop. Raises SettingsError for a token that is not set."""

    def __init__(self, settings: HttpReward):
        self._batch_size = settings.batch_size
        self._client = JsonClient(
            settings.urls,
            token=secret("reward.http.token_env", settings.token_env),
            concurrency=settings.concurrency,
            timeout_s=settings.timeout_s,
            attempts=settings.attempts,
        )

    async def score(self, responses: Sequence[Response]) -> list[Outcome]:
        starts = range(0, len(responses), self._batch_size)
        parts = await asyncio.gather(*(self._batch(responses[at : at + self._batch_size]) for at in starts))
        return [one for part in parts for one in part]

    async def _batch(self, batch: Sequence[Response]) -> list[Outcome]:
        """A batch that the service refuses is sent again one by one: the others are not at fault."""
        body = {
            "query": [one.query for one in batch],
            "prompts": [one.prompt for one in batch],
            "labels": [one.label for one in batch],
        }
        try:
            answer = await self._client.post(body)
        except RequestError as error:
            if error.refused and len(batch) > 1:
                return [(await self._batch([one]))[0] for one in batch]
            return [error.failure] * len(batch)
        try:
            return [finite(one) for one in read_result(answer, len(batch))]
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            return [Failed("unparsable", f"the service's answer: {one_line(error)}")] * len(batch)

    async def close(self) -> None:
        await self._client.close()
