import torch

from evenload.kernels import bf16_key, bf16_unkey, canonical, dense_histogram, high_byte_histogram, low_byte_histogram

EVERY_BF16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
EVERY_NUMBER = EVERY_BF16[~EVERY_BF16.isnan()]


def test_keys_order_every_bf16_number():
    ordered = EVERY_NUMBER[bf16_key(EVERY_NUMBER).argsort()].float()
    assert (ordered[1:] >= ordered[:-1]).all()
    assert bf16_key(EVERY_NUMBER).unique().numel() == EVERY_NUMBER.float().unique().numel()
    assert bf16_key(EVERY_NUMBER).min() >= 0
    assert bf16_key(EVERY_NUMBER).max() <= 65535


def test_both_zeros_share_a_key():
    zeros = torch.tensor([0.0, -0.0], dtype=torch.bfloat16)
    assert bf16_key(zeros)[0] == bf16_key(zeros)[1]


def test_canonical_numbers_are_the_same_numbers_with_one_zero():
    found = canonical(EVERY_NUMBER)
    assert torch.equal(found, EVERY_NUMBER)
    assert found.view(torch.int16).unique().numel() == EVERY_NUMBER.float().unique().numel()


def test_unkey_is_the_inverse():
    assert torch.equal(bf16_unkey(bf16_key(EVERY_NUMBER)), EVERY_NUMBER)


def test_histograms_count_bytes_column_by_column():
    values = canonical(EVERY_NUMBER[torch.randint(len(EVERY_NUMBER), (5000, 3))])
    values[:50] = torch.tensor([-3.0, 0.0, 2.5])
    keys = bf16_key(values)
    expected = torch.stack([torch.bincount(column, minlength=65536) for column in keys.T]).view(3, 256, 256)
    assert torch.equal(dense_histogram(values).view(3, 256, 256), expected.int())
    assert torch.equal(high_byte_histogram(values), expected.sum(dim=2).int())
    for high in (keys[0] >> 8, torch.tensor([1, 127, 254]), torch.tensor([128, 128, 128])):
        assert torch.equal(low_byte_histogram(values, high.long()), expected[torch.arange(3), high.long()].int())
    assert torch.equal(high_byte_histogram(values[:, 1:2].expand(-1, 2)), expected.sum(dim=2)[[1, 1]].int())  # strides


def test_no_rows():
    values = torch.empty(0, 2, dtype=torch.bfloat16)
    assert high_byte_histogram(values).sum() == dense_histogram(values).sum() == 0
    assert low_byte_histogram(values, torch.tensor([1, 2])).shape == (2, 256)
