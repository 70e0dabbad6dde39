"""Where prompts lie, and the rows there: files here and in stores, dataset directories, datasets of the hub."""
