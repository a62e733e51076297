"""Python source for scripts that need torch alone: values, tensors, and the code that compares."""
