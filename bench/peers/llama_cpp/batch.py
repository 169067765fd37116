"""Many sequences in one llama.cpp context, as its server runs them: prompts in one batch, then one token of each per step."""

import time

import llama_cpp as lib

from bench.peers.protocol import Reply, Settings


class Batches:
    """A model and a context with room for `max_prompts` sequences."""

    def __init__(self, settings: Settings) -> None:
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(settings.model.encode(), lib.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {settings.model}")
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = settings.max_context * settings.max_prompts
        params.n_seq_max = settings.max_prompts
        params.n_threads = params.n_threads_batch = settings.threads
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise ValueError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self.batch = lib.llama_batch_init(params.n_batch, 0, 1)
        self.greedy = lib.llama_sampler_init_greedy()

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Reply]:
        """Every prompt to `max_tokens` tokens; they begin and end together."""
        begin = time.perf_counter()
        lib.llama_memory_clear(lib.llama_get_memory(self.context), False)
        answers = [[token] for token in self._step(prompts, [0] * len(prompts))]
        first = time.perf_counter() - begin
        for _ in range(max_tokens - 1):
            places = [len(p) + len(a) - 1 for p, a in zip(prompts, answers, strict=True)]
            for answer, token in zip(answers, self._step([a[-1:] for a in answers], places), strict=True):
                answer.append(token)
        total = time.perf_counter() - begin
        return [{"token_ids": answer, "first_token_s": first, "total_s": total} for answer in answers]

    def _step(self, inputs: list[list[int]], places: list[int]) -> list[int]:
        """Read each sequence's tokens from its place on; the next token of each."""
        row, last_rows = 0, []
        for sequence, (tokens, place) in enumerate(zip(inputs, places, strict=True)):
            for offset, token in enumerate(tokens):
                self.batch.token[row], self.batch.pos[row] = token, place + offset
                self.batch.n_seq_id[row], self.batch.seq_id[row][0] = 1, sequence
                self.batch.logits[row] = offset == len(tokens) - 1
                row += 1
            last_rows.append(row - 1)
        self.batch.n_tokens = row
        status = lib.llama_decode(self.context, self.batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")
        return [lib.llama_sampler_sample(self.greedy, self.context, last) for last in last_rows]
