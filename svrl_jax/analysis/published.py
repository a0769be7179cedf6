"""Published results in percent, to stand beside ours (arXiv 2609.08025 and 2506.20670).

Acc is an LLM judge's, SR the share of questions that searched; real 7B models on the real sets.
"""

SETS = ("FVQA-test", "InfoSeek", "MMSearch", "LiveVQA", "SimpleVQA")
# Policy -> (Acc, SR) a set; SR None where the source gives none.
BENCHMARKS = {
    "Qwen2.5-VL-7B, direct": ((26.7, 0.0), (20.1, 0.0), (12.8, 0.0), (17.8, 0.0), (38.4, 0.0)),
    "GPT-4o, direct": ((41.7, 0.0), (42.7, 0.0), (22.2, 0.0), (26.9, 0.0), (46.6, 0.0)),
    "Qwen2.5-VL-7B, rag": ((51.6, 100), (53.7, 100), (52.2, 100), (48.0, 100), (51.6, 100)),
    "GPT-4o, rag": ((66.0, 100), (59.1, 100), (62.5, 100), (59.6, 100), (63.4, 100)),
    "MMSearch-R1++": ((56.4, 80.3), (55.1, 59.7), (53.8, 88.5), (48.4, 76.2), (57.4, 42.5)),
    "SVRL-7B": ((65.3, 61.4), (64.7, 52.3), (60.3, 82.0), (57.8, 48.6), (58.3, 27.0)),
}
# Policy -> (judge, exact match) on FVQA-test, then on InfoSeek.
SCORERS = {
    "SVRL-7B": ((65.3, 43.0), (64.6, 41.7)),
    "SVRL-8B (Qwen3-VL)": ((64.9, 40.2), (64.0, 36.5)),
    "MMSearch-R1++": ((56.4, 40.6), (55.1, 30.4)),
}
NUM_QUESTIONS = 1800  # FVQA-test
# Policy -> (questions searched, Acc where searched, Acc where not).
CALIBRATION = {"MMSearch-R1++": (1445, 51.0, 78.6), "SVRL-7B": (1105, 56.4, 79.4)}
# Policy -> (wrong with a good query, wrong with a useful result).
ERRORS = {"MMSearch-R1++": (38.4, 33.8), "SVRL-7B": (33.7, 29.1)}
# Items: kept and useful, kept and noise, dropped and useful, dropped and noise.
VERIFIER = {"SVRL-7B": (2851, 1495, 82, 1062)}
UNIQUE_QUERIES = 4.86  # of 5, at inference
SCALING = (63.7, 67.6)  # Acc on 256 questions, at the least and the most searches
# Reward -> FVQA Acc.
ABLATION = {"query alignment alone": 57.7, "search-aware alone": 59.9, "self-verification": 64.2}
