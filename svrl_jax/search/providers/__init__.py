"""Search engines and page readers of others, each behind one HTTP client of ours."""

TEXT_PROVIDERS = ("serper", "serpapi", "tavily")
IMAGE_PROVIDERS = ("serper", "serpapi", "none")
