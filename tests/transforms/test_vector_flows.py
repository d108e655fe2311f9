"""Flows on vectors: what they are made of, Theorem 3 and Remark 1, and parameters that come with each sample."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

import expmflow as ef
from expmflow import transforms as T
from expmflow.testing import check_transform
from expmflow.transforms.original_sylvester import triangles
from transform_registry import BATCH, draw, points, randomise
from vector_flow_cases import AMORTIZABLE, CASES, KINDS

F64 = torch.float64
SYLVESTER = sorted(name for name in AMORTIZABLE if "sylvester" in name)


# --- amortised parameters ---------------------------------------------------------------------------------------------


def own_params(layer: T.Transform, rows: int) -> Tensor:
    """The parameters of a layer as a context for each of so many rows."""
    flat = torch.cat([getattr(layer, name).reshape(-1) for name in layer.shapes])
    return flat.expand(rows, -1)


@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("name", AMORTIZABLE)
def test_an_amortised_layer_is_the_layer_of_each_sample(name, direction):
    """The same parameters for all rows: the same values and the same gradients."""
    case = CASES.ready(name)
    amortised = AMORTIZABLE[name](amortized=True).double()
    x = points(name, case)
    context = own_params(case.layer, BATCH)
    assert context.shape[1] == amortised.params_per_sample
    found = []
    for layer, told in ((case.layer, None), (amortised, context)):
        out, logdet = getattr(layer, direction)(x, told)
        total = (out * draw("out", *out.shape)).sum() + (logdet * draw("logdet", BATCH)).sum()
        found.append((out, logdet, *torch.autograd.grad(total, list(case.layer.parameters()))))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)
    assert case.layer.params_per_sample == 0


@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("name", AMORTIZABLE)
def test_gradients_of_the_context(name, direction):
    case = CASES.ready(f"{name}-amortised")
    x, context = points(name, case), case.context.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda c: getattr(case.layer, direction)(x, c), context, fast_mode=True)


@pytest.mark.parametrize("name", AMORTIZABLE)
def test_second_derivatives_through_the_inverse(name):
    case = CASES.ready(f"{name}-amortised")
    x, context = points(name, case)[:1].requires_grad_(), case.context[:1].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x, c: case.layer.inverse(x, c), (x, context), fast_mode=True, atol=1e-4)


def test_one_context_is_cut_among_the_layers():
    torch.manual_seed(0)
    layers = [T.Planar(4, amortized=True), T.MaskedAutoregressive(4, 6, context_features=2), T.TriangularSylvester(4)]
    layers += [T.TriangularSylvester(4, amortized=True)]
    whole = T.Amortized(layers, context_features=2).double()
    assert whole.params_per_sample == 2 + 9 + 28
    context, x = draw("context", 5, 39), draw("x", 5, 4)
    z, total = x, torch.zeros(5, dtype=F64)
    for layer, own in zip(layers, (context[:, 2:11], context[:, :2], None, context[:, 11:]), strict=True):
        z, logdet = layer(z, own)
        total = total + logdet
    torch.testing.assert_close(whole(x, context), (z, total), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_flows_describe_themselves(name):
    """Whatever context they take."""
    case = CASES.ready(name)
    text = ef.Flow(case.layer, ef.distributions.StandardNormal(case.event)).double().description()
    layers = case.layer.layers if isinstance(case.layer, T.Amortized) else [case.layer]
    assert text.count("\n") == len(layers) + 2


def test_inverses_of_chains_are_taken_apart():
    chain = T.Chain([T.Planar(4, amortized=True), T.Chain([T.TriangularSylvester(4, amortized=True)]), T.Flip()])
    there, back = T.Amortized(chain), T.Amortized(T.Inverse(chain))
    assert [type(layer.transform) for layer in back.layers] == [T.Flip, T.TriangularSylvester, T.Planar]
    x, context = draw("x", 5, 4), draw("context", 5, 37)
    swapped = torch.cat([context[:, 9:], context[:, :9]], 1)
    torch.testing.assert_close(back(there(x, context)[0], swapped)[0], x, rtol=0, atol=1e-11)


def test_chains_are_taken_apart_however_deep_they_are():
    """Inverted and flipped in any order."""
    chain = T.Chain([T.Planar(4, amortized=True), T.TriangularSylvester(4, amortized=True)])
    x, context = draw("x", 5, 4), draw("context", 5, 37)
    swapped = torch.cat([context[:, 9:], context[:, :9]], 1)
    for nested in (T.Inverse(T.Flipped(chain)), T.Flipped(T.Inverse(chain))):
        there, back = T.Amortized(T.Flipped(chain)), T.Amortized(nested)
        assert back.columns == [28, 9]
        torch.testing.assert_close(back(there(x, context)[0], swapped)[0], x, rtol=0, atol=1e-11)
    twice = T.Amortized(T.Inverse(T.Inverse(chain)))
    torch.testing.assert_close(twice(x, context), T.Amortized(chain)(x, context), rtol=0, atol=1e-11)


def test_what_is_amortised_is_refused_without_its_own_layers():
    with pytest.raises(TypeError, match=r"^Expected layers; got Linear\.$"):
        T.Amortized([nn.Linear(2, 2)])
    with pytest.raises(TypeError, match=r"^Planar: Expected a context of dtype torch.float64, as the input; got"):
        T.Planar(2, amortized=True)(draw("x", 3, 2), torch.zeros(3, 5))


HEADS = {  # numbers of an encoder's head with 256 inputs, for 64 latents and 4 flows: those of the original's VAE
    "planar": (lambda k: T.Planar(64, amortized=True), 132_612),
    "orthogonal-8": (lambda k: T.OrthogonalSylvester(64, 8, amortized=True), 616_800),
    "orthogonal-32": (lambda k: T.OrthogonalSylvester(64, 32, amortized=True), 3_256_704),
    "householder-8": (lambda k: T.HouseholderSylvester(64, 8, amortized=True), 4_934_400),
    "triangular": (lambda k: T.TriangularSylvester(64, reverse=k % 2 == 1, amortized=True), 4_408_064),
}


@pytest.mark.parametrize("name", HEADS)
def test_one_head_for_all_flows_has_as_many_numbers_as_the_originals(name):
    make, expected = HEADS[name]
    flow = T.Amortized([make(k) for k in range(4)])
    head = nn.Linear(256, flow.params_per_sample, device="meta")
    assert sum(parameter.numel() for parameter in head.parameters()) == expected


# --- the original Sylvester flow --------------------------------------------------------------------------------------


class Original(nn.Module):
    """f(u) = R̃ h(R u + b) on the first entries of u, zero on the others."""

    def __init__(self, outer: Tensor, inner: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.outer, self.inner, self.bias = outer, inner, bias

    def forward(self, u: Tensor, context: object = None) -> tuple[Tensor, Tensor]:
        size = len(self.bias)
        h = torch.tanh(u[:, :size] @ self.inner.T + self.bias)
        slopes = self.inner.diagonal() * self.outer.diagonal() * (1 - h**2)
        pad = (0, u.shape[1] - size)
        return nn.functional.pad(h @ self.outer.T, pad), nn.functional.pad(slopes, pad)


def parts(layer: T.Transform) -> tuple[Tensor, Original]:
    """Q, completed to a square matrix, and f."""
    params = layer.params(None)
    q = layer.basis(params)[0].detach()
    other = torch.linalg.svd(q.T)[2][q.shape[1] :]  # rows that are orthogonal to the columns of Q
    return torch.cat([q, other.T], 1), Original(*(part[0].detach() for part in triangles(params)))


@pytest.mark.parametrize("name", SYLVESTER)
def test_theorem_3_each_is_a_generalized_flow_with_an_orthogonal_basis(name):
    case = CASES.ready(name)
    q, f = parts(case.layer)
    torch.testing.assert_close(q @ q.T, torch.eye(len(q), dtype=F64), rtol=0, atol=1e-13)
    basis = T.Conv1x1(len(q), "free", start=q.T.contiguous()).double()
    general = T.GeneralizedSylvester(basis, f)
    x = points(name, case)
    general.check_inner(x @ q)
    z, logdet = case.layer(x)
    torch.testing.assert_close(general(x), (z, logdet), rtol=0, atol=1e-12)
    torch.testing.assert_close(general.inverse(z), case.layer.inverse(z), rtol=0, atol=1e-11)
    assert (z - x).abs().max() > 0.01


@pytest.mark.parametrize("name", SYLVESTER)
def test_remark_1_an_invertible_basis_adds_nothing(name):
    """x + W⁻¹ R̃ h(R W x + b) for any invertible W is an original flow, with R R_W and R_W⁻¹ R̃ for W = R_W Q."""
    case = CASES.ready(name)
    _, f = parts(case.layer)
    size = len(f.bias)
    w, x = draw("w", size, size), draw("x", 5, size)
    general = T.GeneralizedSylvester(T.Conv1x1(size, "free", start=w).double(), f)
    r_w, q_w = (torch.from_numpy(part) for part in scipy.linalg.rq(w.numpy()))
    inner, outer = f.inner @ r_w, torch.linalg.solve_triangular(r_w, f.outer, upper=True)
    for triangle in (inner, outer):
        torch.testing.assert_close(triangle, triangle.triu(), rtol=0, atol=1e-12)
    orthogonal = T.Conv1x1(size, "free", start=q_w).double()
    original = T.GeneralizedSylvester(orthogonal, Original(outer, inner, f.bias))
    torch.testing.assert_close(original(x), general(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SYLVESTER)
def test_diagonals_stay_inside_and_one_matrix_serves_both(name):
    layer = CASES.ready(name).layer
    outer, inner, _ = triangles(layer.params(None))
    for triangle in (outer[0], inner[0]):
        torch.testing.assert_close(triangle, triangle.triu(), rtol=0, atol=0)
        assert (triangle.diagonal().abs() < 1).all()
    matrix = layer.matrix
    torch.testing.assert_close(outer[0].triu(1) + inner[0].triu(1).T, matrix - torch.diag(matrix.diagonal()))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("layer", [T.Planar(2), T.TriangularSylvester(2)], ids=["planar", "triangular"])
def test_the_steepest_folds_stay_invertible(layer, dtype):
    """Where tanh and softplus round to their limits, at the very fold: tanh′ = 1."""
    layer = layer.to(dtype)
    with torch.no_grad():
        for name, value in {"w": 30.0, "u": -30.0, "diagonal_outer": 30.0, "diagonal_inner": -30.0}.items():
            if name in layer.shapes:
                getattr(layer, name).fill_(value)
    x = torch.zeros(1, 2, dtype=dtype)
    z, logdet = layer(x)
    back, logdet_back = layer.inverse(z)
    assert logdet.isfinite().all()
    assert (logdet < -10).all()
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(logdet_back, -logdet)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("size", [3.0, 30.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_inverse_of_large_weights(size, sign, dtype):
    """Entries of R of any size, diagonals within rounding of ±1: what the fixed point needs many rounds for."""
    torch.manual_seed(0)
    layer = T.TriangularSylvester(12).to(dtype)
    with torch.no_grad():
        layer.matrix.normal_(std=size)
        layer.diagonal_inner.normal_(std=size)
        layer.diagonal_outer.copy_(sign * layer.diagonal_inner)
        layer.bias.normal_(std=size)
        z = (size * draw("z", 6, 12)).to(dtype)
        x, logdet = layer.inverse(z)
        again, logdet_again = layer(x)
    assert torch.isfinite(logdet).all()
    rounding = 1000 * torch.finfo(dtype).eps * size * 12
    torch.testing.assert_close(again, z, rtol=0, atol=rounding)
    if sign > 0:  # otherwise slopes are close to zero, and what is left of them is rounding
        torch.testing.assert_close(logdet_again, -logdet, rtol=0, atol=rounding)


def test_gram_and_schmidt_do_not_jump():
    """LAPACK's own factor changes its sign with the first entry."""
    layer = T.OrthogonalSylvester(3, 2)
    vectors = draw("vectors", 3, 2).unsqueeze(0)
    vectors[0, 0, 0] = 1e-9
    before, after = (layer.basis({"vectors": v}) for v in (vectors, vectors * torch.tensor([[-1.0], [1.0], [1.0]])))
    torch.testing.assert_close(before[..., 0], after[..., 0], rtol=0, atol=1e-8)


@pytest.mark.parametrize("vectors", [torch.zeros(3, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])])
def test_vectors_without_an_orthonormal_basis_are_refused(vectors):
    """As a head that starts at zero gives them: no gradient would be finite."""
    layer = T.OrthogonalSylvester(3, 2, amortized=True).double()
    context = torch.cat([draw("context", 4, 10), vectors.double().reshape(1, -1).expand(4, -1)], 1)
    assert layer(draw("x", 4, 3), context)[0].isfinite().all()
    context.requires_grad_()
    for direction in (layer, layer.inverse):
        with pytest.raises(
            ValueError, match=r"^OrthogonalSylvester: Expected vectors that are linearly independent; got"
        ):
            direction(draw("x", 4, 3), context)


# --- planar -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0])
def test_planar_flows_are_invertible_whatever_their_weights(scale):
    layer = T.Planar(5, amortized=True)
    x, context = draw("x", 50, 5), scale * draw("context", 50, 11)
    w, u, _, least = layer._direction(context)
    assert (least >= 0).all()  # softplus underflows
    torch.testing.assert_close(1 + (w * u).sum(1, keepdim=True), least, rtol=1e-11, atol=1e-12 * (1 + scale**2))
    z, logdet = layer(x, context)
    back, _ = layer.inverse(z, context)
    torch.testing.assert_close(layer(back, context)[0], z, rtol=0, atol=1e-11 * (1 + scale))
    assert torch.isfinite(logdet).all()


@pytest.mark.parametrize("name", ["planar", "orthogonal-sylvester", "triangular-sylvester-amortised"])
def test_an_inverse_without_a_root_names_the_layer(name):
    """For example after training has diverged."""
    case = CASES.ready(name)
    with torch.no_grad():
        for parameter in case.layer.parameters():
            parameter.fill_(torch.nan)
    context = None if case.context is None else torch.full_like(case.context, torch.nan)
    with pytest.raises(ef.ConvergenceError, match=rf"^{case.name}: Expected a root of"):
        case.layer.inverse(points(name, case), context)


def test_planar_flow_that_looks_nowhere_moves_everything_alike():
    layer, x = T.Planar(3, amortized=True), draw("x", 4, 3)
    context = draw("context", 4, 7)
    context[:, 3:6] = 0
    z, logdet = layer(x, context)
    torch.testing.assert_close(z - x, context[:, :3] * torch.tanh(context[:, 6:]))
    assert (logdet == 0).all()
    torch.testing.assert_close(layer.inverse(z, context)[0], x)


# --- autoregressive ---------------------------------------------------------------------------------------------------

AUTOREGRESSIVE = sorted(name for name in CASES if name.split("-")[0] in KINDS)


@pytest.mark.parametrize("name", AUTOREGRESSIVE)
def test_each_entry_sees_those_before_it(name):
    """Both directions have a triangular Jacobian, in raster order with the channels of a point in theirs."""
    case = CASES.ready(name)
    x = points(name, case)[:1]
    context = None if case.context is None else case.context[:1]
    for direction in (case.layer, case.layer.inverse):
        jacobian = torch.autograd.functional.jacobian(lambda x, run=direction: run(x, context)[0], x)
        jacobian = jacobian.reshape(*case.event, *case.event)
        axes = [*range(1, len(case.event)), 0]
        matrix = jacobian.permute(*axes, *(len(case.event) + a for a in axes)).reshape(x.numel(), x.numel())
        assert (matrix.triu(1).abs() < 1e-13).all()
        assert (matrix.diagonal() > 0).all()
        if len(matrix) > 1:
            assert (matrix.tril(-1).abs().amax(1)[1:] > 0).all()


@pytest.mark.parametrize("name", AUTOREGRESSIVE)
def test_the_iterated_direction_takes_a_pass_per_entry_at_most(name):
    case = CASES.ready(name)
    x = points(name, case)
    iterated = case.layer.inverse if "forward" in case.layer.closed_form else case.layer
    with torch.no_grad():
        iterated(x, case.context)
    assert 1 <= case.layer.last_iterations <= x[0].numel() + 1


def test_masked_autoregressive_by_hand():
    """Papamakarios: entry after entry, data from noise."""
    case = CASES.ready("maf-context")
    layer, z, context = case.layer, points("maf-context", case), case.context
    x = torch.zeros_like(z)
    with torch.no_grad():
        for k in range(4):
            s, t = layer.net(x, context).chunk(2, 1)
            x[:, k] = ((z - t) * torch.exp(-2 * torch.tanh(s / 2)))[:, k]
        torch.testing.assert_close(layer.inverse(z, context)[0], x, rtol=0, atol=1e-12)


def test_inverse_autoregressive_by_hand():
    """Kingma: a gate σ(s + 1) between the noise and m, both of the noise before."""
    case = CASES.ready("iaf-context")
    layer, z, context = case.layer, points("iaf-context", case), case.context
    with torch.no_grad():
        s, m = layer.net(z, context).chunk(2, 1)
        gate = torch.sigmoid(s + 1)
        x, logdet = layer.inverse(z, context)
    torch.testing.assert_close(x, gate * z + (1 - gate) * m, rtol=0, atol=1e-13)
    torch.testing.assert_close(logdet, gate.log().sum(1), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("dims", "event"), [(0, (4,)), (2, (4, 3, 3))])
def test_gates_start_open(dims, event):
    torch.manual_seed(0)
    layer, z = T.InverseAutoregressive(4, 8, dims=dims).double(), draw("z", 5, *event)
    x, logdet = layer.inverse(z)
    gate = torch.sigmoid(torch.tensor(2.0, dtype=F64))
    torch.testing.assert_close(logdet / z[0].numel(), gate.log().expand(5), rtol=0.05, atol=0)
    torch.testing.assert_close(x, gate * z, rtol=0, atol=0.05)


@torch.no_grad()
def test_an_open_gate_lets_everything_through_whatever_the_mean():
    """x = z then, to the last digit, and back."""
    layer, z = T.InverseAutoregressive(3, 4), draw("z", 5, 3).float()
    layer.net.last.parametrizations.weight.original.zero_()
    layer.net.last.bias.copy_(torch.tensor([40.0] * 3 + [1e6] * 3))
    torch.testing.assert_close(layer.inverse(z)[0], z, rtol=0, atol=0)
    torch.testing.assert_close(layer(z)[0], z, rtol=0, atol=0)


def test_a_long_event_with_steep_weights():
    """Forty entries whose inverse stretches: float64 gets back what float32 cannot, and says so or is right."""
    torch.manual_seed(1)
    layer = T.MaskedAutoregressive(40, 64).double()
    randomise(layer)
    x = draw("x", 3, 40)
    with torch.no_grad():
        z, _ = layer(x)
        back, _ = layer.inverse(z)
        again, _ = layer(back)
    torch.testing.assert_close(again, z, rtol=0, atol=1e-9)
    check_transform(T.Inverse(layer), x[:2, :].clone(), tol=1e-6)


REFUSED = {
    "vectors": (lambda: T.OrthogonalSylvester(3, 4), "at most 3 vectors, the features"),
    "reflections": (lambda: T.HouseholderSylvester(3, 0), "reflections of at least 1"),
    "features": (lambda: T.TriangularSylvester(0), "features of at least 1"),
    "planar": (lambda: T.Planar(0), "features of at least 1"),
    "transformer": (lambda: T.MaskedAutoregressive(3, 4, transformer="cubic"), "transformer to be one of affine"),
    "components": (lambda: T.MaskedAutoregressive(3, 4, transformer="mixture", components=0), "components of at least"),
    "dims": (lambda: T.InverseAutoregressive(3, 4, dims=4), "0 spatial axes"),
    "widths": (lambda: T.InverseAutoregressive(3, [4, 4], dims=2), "one width"),
    "context": (lambda: T.Amortized([], context_features=-1), "context_features of at least 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^Expected .*{message}.*; got "):
        make()
