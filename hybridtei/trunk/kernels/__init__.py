"""The kernels behind `Layout.attend`: one file a library, all computing the same; which one runs is `choice`'s to say."""
