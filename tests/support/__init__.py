"""What tests share: wrong compilers, models, programs, and what is asked of reports."""
