"""The serving benchmark: drives OpenAI-compatible endpoints with a load and says how they answered."""
