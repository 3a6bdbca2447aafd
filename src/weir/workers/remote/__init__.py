"""Workers that attach from outside, in any language, in lock step."""
