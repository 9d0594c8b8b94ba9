"""Code that runs inside the processes of vLLM or uses names of vLLM."""
