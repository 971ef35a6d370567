"""Questions about handwritten and spoken digits, for runs on a laptop: rows and processors."""
