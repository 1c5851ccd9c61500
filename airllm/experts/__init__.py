"""The slot backend: the path of an expert from file to arithmetic.

One-way flow: ``layout`` says what one expert is, ``bank`` holds all of them in pinned host memory, ``slots`` is the one
device allocation, ``budget``/``policy``/``plan`` decide in pure Python, ``transfer`` moves bytes, ``compute`` does the
arithmetic, ``runtime`` puts one layer together, ``modules`` stands where the model's own experts module stood.

Shape letters used in this package::

    T  tokens (rows) of one forward       K  experts a token is routed to
    E  experts of a layer                 L  layers with experts
    H  hidden width                       I  width of an expert
    S  slots

Words: *bank* host bytes of all experts; *slot* device bytes of one cached expert; *scratch* device bytes of an expert
that will not be cached; *lease* promise that a slot keeps its expert; *wave* experts computed together because they fit.
"""
