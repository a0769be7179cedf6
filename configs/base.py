"""Every key of a run, with its unit and its reason. Other configs start from here and change a few
lines.

Fractions are in [0, 1], lengths in tokens, times in seconds, unless a key says otherwise. The
defaults are the published recipe (arXiv 2609.08025) where it is public, ours where it is not; SPEC
constants that are ours are marked so.
"""

from ml_collections import ConfigDict, config_dict


def get_config(arg: str = "") -> ConfigDict:
    """Returns the base config. `arg` takes no word here; a run config may."""
    if arg:
        raise ValueError(f"configs/base.py takes no argument, got {arg!r}")
    config = ConfigDict()

    config.seed = 0  # every draw's key starts from it
    config.num_steps = 400  # optimiser steps (published: 400)
    config.save_every = 50  # steps between checkpoints; the last step is always saved
    config.keep_checkpoints = 2  # older ones are deleted
    config.log_episodes = True  # write every episode's record (text, arrays, pictures)

    config.data = _data()
    config.prompt = _prompt()
    config.model = _model()
    config.lora = _lora()
    config.mesh = _mesh()
    config.rollout = _rollout()
    config.remote = _remote()
    config.search = _search()
    config.reward = _reward()
    config.grpo = _grpo()
    config.optim = _optim()
    config.alarms = _alarms()
    config.eval = _eval()
    config.pretrain = _pretrain()
    return config


def _data() -> ConfigDict:
    c = ConfigDict()
    c.source = "world"  # `world`, the embedded one, or a folder that `prepare` made
    c.split = "train"  # of the source; training reads it
    c.prompts_per_step = 32  # P, questions a step (published: 32)
    # Question pictures are brought to at most this area (SPEC: 1,152 tokens at 28 px), and further
    # where the prompt would be longer than max_prompt_tokens or leave no room for one turn. Rows
    # that do not fit even so are left out of training and counted; evaluation keeps them.
    c.max_picture_pixels = 903_168
    c.max_prompt_tokens = 4096  # MMSearch-R1's limit
    c.read_threads = 4  # threads that decode and cut pictures in each process; 0: none
    c.workers = 0  # processes that do so, each with read_threads; 0: threads of this process only
    c.prefetch_batches = 2  # batches held ready (by each worker); bounds the memory
    c.draws_per_item = 1  # picture draws and paraphrases of each test item; embedded world only
    c.picture_width_px = 84  # drawn canvas of the embedded world
    c.picture_height_px = 56
    return c


def _prompt() -> ConfigDict:
    c = ConfigDict()
    c.agent_file = "svrl_jax/protocol/prompts/agent.txt"  # system message of the agent regime
    c.direct_file = "svrl_jax/protocol/prompts/direct.txt"  # of the tool-free regime
    return c


def _model() -> ConfigDict:
    c = ConfigDict()
    c.folder = config_dict.placeholder(str)  # Hugging Face folder of the initial policy
    c.param_dtype = "float32"  # master weights
    c.compute_dtype = "float32"  # of activations and matrix products; bfloat16 on accelerators
    c.attention = "auto"  # backend of training rows: auto, dense, blockwise, pallas, cudnn
    c.remat = (
        "none"  # kept for the backward pass: `none` all, `dots` products, `layer` inputs alone
    )
    return c


def _lora() -> ConfigDict:
    """Low-rank adapters: they alone are trained, and the reference policy is free."""
    c = ConfigDict()
    c.rank = 0  # r; 0 trains the weights themselves
    c.alpha = 32.0  # adapters are scaled by alpha / rank
    # Patterns of linear maps, without layer numbers; `visual.blocks.*` for the vision tower too.
    c.targets = ("language_model.layers.*",)
    return c


def _mesh() -> ConfigDict:
    """Devices along each axis of the update's mesh; one may be -1, the rest."""
    c = ConfigDict()
    c.data = 1  # rows are split, parameters copied
    c.fsdp = -1  # rows and parameters are split
    c.tensor = 1  # heads, MLP units and the vocabulary are split
    return c


def _rollout() -> ConfigDict:
    c = ConfigDict()
    c.group_size = 4  # G, episodes a question (published: 4; MMSearch-R1: 8)
    c.temperature = 1.0  # log-probs are over raw logits / temperature; 0 is greedy
    # Truncated draws are for evaluation; training refuses them, since log-probs on both sides are
    # of the whole distribution.
    c.top_k = 0  # only the k likeliest tokens can be drawn; 0: all
    c.top_p = 1.0  # only tokens with less mass than this before them can be drawn; 1: all
    c.budget = 8124  # tokens of an episode, everything included (published)
    c.max_turn_tokens = 2048  # sampled tokens of one turn; reaching it is `budget`
    c.answer_reserve = 64  # room that must be left for an answer after tool text
    c.max_image_searches = 1  # published
    c.max_text_searches = 2  # published
    c.num_queries = 5  # k, proposals of a text search (published)
    c.query_choice = "random"  # which proposal runs: `random` (training) or `first`
    c.lanes = 128  # rows that one decode program advances
    c.slots = 128  # rows that hold a cache
    c.decode_chunk = 8  # tokens decoded on the device between looks at the stop rule
    c.cache_dtype = "float32"
    c.tool_timeout_s = 30.0  # deadline of one tool call; then it counts as failed
    c.episode_tools_timeout_s = 0.0  # of all tool calls of an episode together; 0: no limit
    c.tool_picture_pixels = 50_176  # area of an item's thumbnail as it is shown; 0: none is
    # Tool results come in together, so that batches do not depend on how long tools take: a resumed
    # run then equals an unbroken one to the bit, where tools are local or replayed. Costs waiting.
    c.deterministic = False
    return c


def _remote() -> ConfigDict:
    """A policy behind an OpenAI-compatible server; its key is in the environment."""
    c = _provider("http://127.0.0.1:8000/v1", per_minute=6000, usd_per_call=0.0)
    c.model = ""  # the served model's name
    c.limit_field = "max_tokens"  # newer OpenAI models want `max_completion_tokens`
    c.timeout_s = 300.0  # of one turn, retries included
    c.max_retries = 5  # of a failure that may pass
    c.max_wait_s = 30.0  # longest wait before a retry, whatever the server asks
    return c


def _search() -> ConfigDict:
    c = ConfigDict()
    c.image_top_k = 5  # items of an image search (published)
    c.text_top_k = 5  # items of a text search (published)
    c.image_items = "full"  # `full`: title, link, summary; `titles`: MMSearch-R1's form
    c.show_links = True  # links are part of an item's text
    c.summary_words = 120  # words of a summary; offline a window around the query's words
    # Where results come from: `local`, the embedded world; `index`, a folder that the mode `index`
    # made; `live`, the providers named below, the record, or both; `server`, what the mode
    # search-server serves elsewhere.
    c.kind = "local"
    c.index_folder = ""  # of kind `index`
    c.text_provider = "serper"  # `serper`, `serpapi`, `tavily`; each key is in the environment
    c.image_provider = "serper"  # `serper`, `serpapi`, or `none` (then max_image_searches is 0)
    c.uploader = ""  # `module:function`, picture bytes -> public address, for rows without one
    c.page_reader = "fetch"  # `fetch`: our own, `jina`, or `none`: the provider's snippets
    c.summariser = "sentences"  # the page's own best sentences, or `model`: search.chat
    c.unread_pages = "snippet"  # an unread page's item shows its `snippet`, or is left out: `drop`
    c.thumbnails = False  # fetch image results' thumbnails into their items, and so into records
    c.record_mode = "off"  # `record`, `replay` (asks nobody), `replay_or_live` (search/record.py)
    c.record_file = ""  # sqlite file of the record; processes may share it
    c.max_calls = 0  # calls of one start of the run, retries included; 0: no limit
    c.max_usd = 0.0  # their price, by usd_per_call below; 0: no limit
    c.max_retries = 3  # of a call whose failure may pass, within its deadline
    c.max_wait_s = 20.0  # longest wait before a retry, whatever a provider asks
    c.page_chars = 12_000  # characters of a page that are summarised
    c.page_max_bytes = 5_000_000  # opened bytes of a page or picture
    c.max_redirects = 5
    c.max_picture_pixels = 40_000_000  # of a thumbnail as it comes
    c.thumbnail_px = 224  # longer side of a thumbnail as it is kept
    c.allow_private = False  # let pages be read from private and loopback addresses
    # Paces are the vendors' lower ones; prices are rough, for max_usd: set your plan's.
    c.serper = _provider("https://google.serper.dev", per_minute=300, usd_per_call=0.001)
    c.serpapi = _provider("https://serpapi.com", per_minute=60, usd_per_call=0.015)
    c.tavily = _provider("https://api.tavily.com", per_minute=100, usd_per_call=0.008)
    c.jina = _provider("https://r.jina.ai", per_minute=20, usd_per_call=0.0)  # the keyless pace
    c.server = _provider("http://127.0.0.1:8100", per_minute=60_000, usd_per_call=0.0)
    c.server.concurrency = 128
    c.chat = _provider("http://127.0.0.1:8000/v1", per_minute=6000, usd_per_call=0.0)
    c.chat.model = "Qwen/Qwen3-32B"  # writes the summaries, behind any OpenAI-compatible endpoint
    return c


def _provider(endpoint: str, *, per_minute: float, usd_per_call: float) -> ConfigDict:
    c = ConfigDict()
    c.endpoint = endpoint  # address before the paths of its interface
    c.per_minute = float(per_minute)  # starts of calls a minute, evenly spaced
    c.concurrency = 16  # calls at once
    c.usd_per_call = usd_per_call  # US dollars
    return c


def _reward() -> ConfigDict:
    c = ConfigDict()
    # `em`, `em_published`, `sub_em`, `f1`; `infoseek`, `mmsearch_f1`, `simplevqa`, `livevqa` are
    # the benchmarks' own (rewards/published.py)
    c.scorer = "em"
    c.w_format = 0.1  # weight of r_format (published)
    c.use_aware = True  # each factor can be switched off; the ablations do
    c.use_count = True
    c.use_qalign = True
    c.use_salign = True
    c.search_free_scale = 0.1  # lambda: r_aware of a searched search_free instance (published)
    c.count_floor = 0.1  # eps of r_count (ours)
    c.qalign_floor = 0.5  # r_qalign when every query is bad (ours)
    c.salign_floor = 0.5  # r_salign when every mask entry is wrong (ours)
    c.qalign_over = "executed"  # `executed` or `all` proposals
    c.gate = True  # verification factors multiply r_acc; False only as an ablation
    c.search_penalty = 0.0  # flat factor (1 - p) on r_acc if any tool was called (MMSearch-R1: 0.1)
    c.drop_flagged = True  # episodes with a failed tool leave the group
    c.drop_unanswered_oracle = True  # episodes whose oracle did not answer leave the group
    # Who labels queries and items in training: `rule`, offline; `model`, behind oracle_chat;
    # `policy`, the frozen initial policy (rollout.budget must have room for what it reads).
    c.oracle = "rule"
    c.min_alias_chars = 3  # rule oracle: shorter aliases do not count as evidence
    c.oracle_chat = _chat("Qwen/Qwen3-32B")  # key: ORACLE_API_KEY
    c.oracle_record = ""  # sqlite file that keeps replies; "": oracle.sqlite in the run's folder
    # `greedy` pass of the initial policy; `rate` of its right answers over samples; `category` of
    # the data set where it says so (FVQA's training rows), else the greedy pass.
    c.search_free_source = "greedy"
    c.search_free_rate = 0.5  # t of `rate >= t`
    c.search_free_samples = 4  # n of the tool-free success rate; 0 keeps the greedy label alone
    return c


def _grpo() -> ConfigDict:
    c = ConfigDict()
    c.objective = "dr_grpo"  # `dr_grpo`, `grpo`, `dapo`, `gspo` (grpo/loss.py)
    c.clip_low = 0.2  # epsilon below; gspo wants about 3e-4
    c.clip_high = 0.2  # epsilon above; gspo wants about 4e-4
    c.kl_coef = 0.001  # beta of the KL term to the frozen initial policy (published)
    c.kl_estimator = "k3"  # `k1`, `k2`, `k3`
    c.ref_dtype = "float32"  # of the frozen initial policy; bfloat16 halves its memory
    c.inner_steps = 1  # passes over a batch of episodes
    c.minibatches = 1  # optimiser steps of a pass; groups stay whole
    c.drop_equal_groups = False  # leave groups without spread out of the batch (their KL too)
    c.equal_tolerance = 1e-6  # max - min of shaped rewards below which a group is equal
    c.max_resamples = 0  # times a step samples its equal groups again; the last draw counts
    c.mask_overlong = False  # episodes that ran out of budget leave the loss, not the statistics
    c.importance_cap = 0.0  # truncated importance weight's cap; 0 turns it off
    # What stands in a row (grpo/rows.py): `single` episodes, `packed` ones, or `shared` prompts.
    # The result does not depend on it, nor on the sizes below.
    c.layout = "shared"
    c.row_tokens = 8192  # length of packed and shared rows
    c.length_buckets = (8192,)  # padded lengths of single rows
    c.microbatch_rows = 32  # rows of one gradient program
    return c


def _optim() -> ConfigDict:
    c = ConfigDict()
    c.learning_rate = 2e-6  # published
    c.warmup_steps = 0
    c.weight_decay = 0.0
    c.b1 = 0.9
    c.b2 = 0.95
    c.clip_norm = 1.0  # global gradient norm
    c.freeze = ()  # patterns of parameters that stay as they are, such as "visual.*"
    return c


def _alarms() -> ConfigDict:
    """What is watched while a run goes on (training/alarms.py): a threshold, how many steps in a
    row it must be passed, and what happens then: `off`, `warn` or `stop` (saved before)."""
    c = ConfigDict()
    c.sr_collapse = _alarm(0.02, 10, "warn")  # SR at or below: the policy has stopped searching
    c.constant_mask = _alarm(0.98, 10, "warn")  # share of verify entries that are equal, at least
    c.length_growth = _alarm(2.0, 5, "warn")  # policy tokens over those of the first steps, above
    c.entropy_collapse = _alarm(0.05, 5, "warn")  # nats a token, below
    c.sampler_gap = _alarm(0.05, 3, "warn")  # mean |log-prob difference| of sampler and trainer
    c.kl = _alarm(0.5, 3, "warn")  # nats a token to the initial policy, above
    c.skipped_updates = _alarm(0.5, 3, "stop")  # updates with a gradient that was not finite
    c.first_steps = 5  # steps whose mean is the measure of length growth
    return c


def _alarm(threshold: float, steps: int, action: str) -> ConfigDict:
    c = ConfigDict()
    c.threshold = threshold
    c.steps = steps  # in a row
    c.action = action
    return c


def _eval() -> ConfigDict:
    c = ConfigDict()
    c.every = 0  # steps between evaluations during training; 0: only at the end
    # Splits of data.source, or `SET/SPLIT` of the folder beside it; () takes all but training's.
    c.splits = ()
    c.modes = ("sampled", "greedy")  # temperature 1, temperature 0
    c.query_choice = "first"  # which proposal runs at evaluation
    c.num_items = 0  # 0: all
    # At the end of training, evaluate the initial policy and scripted marks too; else the trained
    # policy alone.
    c.compare = True
    c.samples = 1  # episodes a question where the mode is sampled; greedy has one
    # Scorers of the answers: `judge`, or any that reward.scorer takes; Acc is by the first. ()
    # takes reward.scorer.
    c.scorers = ()
    # Of the regime `agent_verifier`: what filters items before the policy sees them. `model`:
    # eval.verifier; `words`: a rule, keeps items that share a word with the question or query.
    c.filter = "model"
    # Of test-time scaling: "" for letters in common (local, light), sentence-transformers/MODEL, or
    # module:function, texts -> vectors.
    c.embedding = ""
    c.usd_per_million_in = 0.0  # price of the policy's input tokens, US dollars, for tables
    c.usd_per_million_out = 0.0  # of its generated tokens
    c.judge = _chat("gpt-5-mini")  # key: JUDGE_API_KEY
    c.verifier = _chat("Qwen/Qwen3-32B")  # key: VERIFIER_API_KEY
    c.judge_record = ""  # sqlite file that keeps verdicts; "": judge.sqlite in the run folder
    return c


def _chat(model: str) -> ConfigDict:
    """A model behind an OpenAI-compatible endpoint."""
    c = _provider("http://127.0.0.1:8000/v1", per_minute=6000, usd_per_call=0.0)
    c.model = model
    c.timeout_s = 60.0  # of a call, its retries included
    c.max_retries = 4
    return c


def _pretrain() -> ConfigDict:
    """How the embedded default's initial policy is made; unused by other runs."""
    c = ConfigDict()
    c.out = "svrl_jax/data/quickstart"  # folder of the finished policy
    c.seed = 0  # of the weights and the demonstrations
    c.vocab_size = 2560  # entries of the byte-level BPE, special tokens included
    c.hidden_size = 128
    c.num_layers = 4
    c.num_heads = 4
    c.num_kv_heads = 2
    c.mlp_size = 352
    c.vision_hidden_size = 64
    c.vision_depth = 2
    c.vision_heads = 4
    c.vision_mlp_size = 160
    c.row_tokens = 448  # demonstrations are packed into rows of this length
    c.rows = 10  # rows of a step
    c.learning_rate = 2e-3
    c.warmup_steps = 20  # at the start of each phase, which starts a new optimiser
    c.weight_decay = 0.05
    c.clip_norm = 1.0
    c.known_share = 0.5  # share of entities whose name is taught with the picture
    c.picture_draws = 16  # random pictures drawn of each entity
    c.keep_phases = ""  # folder for the weights after each phase; "" keeps none
    # First phase to run, "" for all; the weights before it are then read from keep_phases.
    c.start_at = ""
    c.phases = ConfigDict()
    c.phases.p0_copy = _phase(300, copy_share=1.0, copy_doubling=4500)
    c.phases.p1_look = _phase(
        400, first_turn_only=True, direct_share=0.3, copy_share=0.3, visual=2.0
    )
    c.phases.p2_read_few = _phase(600, max_items=2, copy_share=0.1)
    c.phases.p3_read_all = _phase(1000, copy_share=0.05, rate_to=0.4)
    # The bad habits that RL is to unlearn, at the rates that the README names.
    c.phases.p4_habits = _phase(
        500, needless_search=0.6, lazy_mask=0.6, repeat_queries=0.6, rate_from=0.4, rate_to=0.02
    )
    return c


def _phase(
    steps: int,
    *,
    first_turn_only: bool = False,
    rate_from: float = 1.0,
    rate_to: float = 1.0,
    copy_share: float = 0.0,
    copy_doubling: int = 0,
    visual: float = 1.0,
    naming: float = 0.9,
    fact: float = 2.0,
    direct_share: float = 0.15,
    max_items: int = 0,
    second_search: float = 0.1,
    swap_names: float = 0.9,
    swap_answers: float = 1.0,
    novel_pictures: float = 0.5,
    needless_search: float = 0.0,
    lazy_mask: float = 0.0,
    repeat_queries: float = 0.0,
) -> ConfigDict:
    c = ConfigDict()
    c.steps = steps
    c.rate_from, c.rate_to = rate_from, rate_to  # of the learning rate, linear within the phase
    c.copy_share = copy_share  # share of demonstrations that are random ids written twice
    # After so many of them the number of different ids doubles, from 64 on; 0: all from the start.
    c.copy_doubling = copy_doubling
    c.visual, c.naming, c.fact = visual, naming, fact  # how often such an item is drawn, a weight
    c.first_turn_only = first_turn_only  # short rows: name and look, no reading yet
    c.direct_share = direct_share  # share of demonstrations under the tool-free prompt
    c.max_items = max_items  # items shown at most; 0: all
    c.second_search = second_search  # share that asks again when the answer is not in sight
    c.swap_names = swap_names  # share of the unknown whose name is replaced throughout
    # Share in which the answer is replaced in the shown text: at 1 no fact is ever memorised, so
    # that training questions are no easier than test questions.
    c.swap_answers = swap_answers
    c.novel_pictures = novel_pictures  # share of renamed ones shown with a picture that is nobody's
    c.needless_search = needless_search  # share that looks up what is plain to see
    c.lazy_mask = lazy_mask  # share that keeps every item
    c.repeat_queries = repeat_queries  # share that repeats one or two queries
    return c
