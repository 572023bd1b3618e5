"""The backends of this project against the catalogue, and models: an encoder and a language model."""
