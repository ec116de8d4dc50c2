// HvdExt>CacheRead, HvdExt>CacheLookup and HvdExt>CacheInsert: batches of samples out of a store and into it.
//
// A sample has components, each a row of one dtype; its record holds them one after the other: numbers as they lie in
// memory, and for each string its length (uint32) and its bytes. A lookup copies every row once, from where the store
// has it to where the batch will have it. CacheRead also has loaded what is not there, and so gives the whole batch: a
// pipeline runs this one op for a batch, because beside the copy of small samples every further op costs much.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "base/mutex.h"
#include "cache/absent.h"
#include "cache/store.h"
#include "ops/data/batch_memory.h"
#include "ops/data/capi.h"

namespace hvd_ext {
namespace {

using Length = uint32_t;  // of a string in a record

struct Component {
  TF_DataType dtype = TF_UINT8;
  int64_t elements = 0;  // of one sample
  bool strings() const { return dtype == TF_STRING; }
  int64_t nbytes() const { return elements * static_cast<int64_t>(TF_DataTypeSize(dtype)); }
};

bool CanBeStored(TF_DataType dtype) {
  return dtype == TF_STRING || (dtype != TF_RESOURCE && dtype != TF_VARIANT && TF_DataTypeSize(dtype) > 0);
}

std::string Numbered(const char* what, int64_t number) {
  return std::string(what) + " (" + std::to_string(number) + ")";
}

std::shared_ptr<Store> StoreOf(Run& run, int64_t cache) {
  std::shared_ptr<Store> store = run.ok() ? FindStore(cache) : nullptr;
  if (run.ok() && store == nullptr) {
    run.Take(Invalid(Numbered("cache", cache) + ": must be the number of a cache that is open in this process"));
  }
  return store;
}

// --- lookup

struct LookupKernel {  // of a read, too, which never waits itself
  bool wait = false;
  std::vector<Component> components;
};

// Where TensorFlow's own calls fail, `status` has its words.
Status ReadAttributes(TF_OpKernelConstruction* construction, TF_Status* status, LookupKernel* kernel) {
  int32_t n = 0, n_elements = 0, unused = 0;
  TF_OpKernelConstruction_GetAttrSize(construction, "dtypes", &n, &unused, status);
  if (TF_GetCode(status) != TF_OK) return Status::Ok();
  TF_OpKernelConstruction_GetAttrSize(construction, "elements", &n_elements, &unused, status);
  if (TF_GetCode(status) != TF_OK) return Status::Ok();
  if (n != n_elements) {
    return Invalid("elements (" + std::to_string(n_elements) + " numbers): must be one for each of the " +
                   std::to_string(n) + " dtypes");
  }
  std::vector<TF_DataType> dtypes(n);
  std::vector<int64_t> elements(n);
  TF_OpKernelConstruction_GetAttrTypeList(construction, "dtypes", dtypes.data(), n, status);
  if (TF_GetCode(status) != TF_OK) return Status::Ok();
  TF_OpKernelConstruction_GetAttrInt64List(construction, "elements", elements.data(), n, status);
  if (TF_GetCode(status) != TF_OK) return Status::Ok();
  for (int i = 0; i < n; ++i) {
    if (!CanBeStored(dtypes[i])) {
      return Invalid(Numbered("dtype", dtypes[i]) + Numbered(" of component", i) +
                     ": must be of numbers or strings; tf.io.serialize_tensor makes strings of other tensors");
    }
    if (elements[i] < 0) return Invalid(Numbered("elements", elements[i]) + ": must not be negative");
    kernel->components.push_back({dtypes[i], elements[i]});
  }
  return Status::Ok();
}

void* MakeKernel(TF_OpKernelConstruction* construction, bool waits) {
  StatusPointer status(TF_NewStatus());
  auto kernel = std::make_unique<LookupKernel>();
  TF_Bool wait = 0;
  if (waits) TF_OpKernelConstruction_GetAttrBool(construction, "wait", &wait, status.get());
  kernel->wait = wait != 0;
  if (TF_GetCode(status.get()) == TF_OK) {
    Status read = ReadAttributes(construction, status.get(), kernel.get());
    if (!read.ok()) TF_SetStatus(status.get(), TF_INVALID_ARGUMENT, read.message.c_str());
  }
  if (TF_GetCode(status.get()) != TF_OK) TF_OpKernelConstruction_Failure(construction, status.get());
  return kernel.release();
}

void* MakeLookup(TF_OpKernelConstruction* construction) { return MakeKernel(construction, true); }
void* MakeRead(TF_OpKernelConstruction* construction) { return MakeKernel(construction, false); }

void DropLookup(void* kernel) { delete static_cast<LookupKernel*>(kernel); }

// Copies a record to its row of each component; returns false where the record does not have this form.
bool TakeRecord(const std::vector<Component>& components, const std::vector<TF_Tensor*>& batch, int64_t row,
                const char* data, int64_t nbytes) {
  const char* const end = data + nbytes;
  for (size_t i = 0; i < components.size(); ++i) {
    const Component& component = components[i];
    if (!component.strings()) {
      const int64_t size = component.nbytes();
      if (end - data < size) return false;
      if (size > 0) std::memcpy(DataOf<char>(batch[i]) + row * size, data, static_cast<size_t>(size));
      data += size;
      continue;
    }
    TF_TString* strings = DataOf<TF_TString>(batch[i]) + row * component.elements;
    for (int64_t element = 0; element < component.elements; ++element) {
      Length length = 0;
      if (end - data < static_cast<int64_t>(sizeof(length))) return false;
      std::memcpy(&length, data, sizeof(length));
      data += sizeof(length);
      if (end - data < static_cast<int64_t>(length)) return false;
      TF_TString_Copy(strings + element, data, length);
      data += length;
    }
  }
  return data == end;
}

void ClearRow(const std::vector<Component>& components, const std::vector<TF_Tensor*>& batch, int64_t row) {
  for (size_t i = 0; i < components.size(); ++i) {  // strings are empty from the beginning
    const int64_t size = components[i].strings() ? 0 : components[i].nbytes();
    if (size > 0) std::memset(DataOf<char>(batch[i]) + row * size, 0, static_cast<size_t>(size));
  }
}

std::string WordsOf(const std::vector<Component>& components) {
  std::string text;
  for (const Component& component : components) {
    text += (text.empty() ? "" : " + ") + std::to_string(component.elements) +
            (component.strings() ? " strings" : " x " + std::to_string(TF_DataTypeSize(component.dtype)) + " bytes");
  }
  return text;
}

// A batch that is being looked up. After a failure of the run nothing in it may be used but `store` and `missing`.
struct Batch {
  Batch(const std::vector<Component>& components, Run& run) : components(components), run(run) {}

  const std::vector<Component>& components;
  Run& run;
  std::shared_ptr<Store> store;
  int64_t cache = 0, n = 0;
  const int64_t* numbers = nullptr;
  std::vector<TF_Tensor*> tensors;
  std::vector<int64_t> missing, pending;  // places in `numbers`
  Mutex failing;

  // Any number of threads may call it at the same time, each with places of its own.
  void Take(int64_t place, const char* data, int64_t nbytes) {
    if (TakeRecord(components, tensors, place, data, nbytes)) return;
    MutexLock lock(&failing);
    run.Fail(TF_FAILED_PRECONDITION, Numbered("sample", numbers[place]) + ": its record has " + std::to_string(nbytes) +
                                         " bytes, which are not " + WordsOf(components) +
                                         ": the cache holds samples of another form; give it another name or version");
  }
  void GiveMissingBack() {
    for (int64_t place : missing) store->Release(numbers + place, 1);
  }
};

void LookUp(bool wait, Batch* batch) {
  Run& run = batch->run;
  const TF_Tensor* given = run.Vector(0, "numbers");
  batch->cache = run.Scalar(1, "cache");
  batch->store = StoreOf(run, batch->cache);
  if (!run.ok()) return;
  const int64_t n = TF_Dim(given, 0);
  batch->n = n;
  batch->numbers = DataOf<const int64_t>(given);
  for (size_t i = 0; i < batch->components.size(); ++i) {
    const Component& component = batch->components[i];
    const int output = static_cast<int>(i);
    const std::initializer_list<int64_t> dims = {n, component.elements};
    batch->tensors.push_back(!component.strings() && n * component.nbytes() >= kLeastRecycled
                                 ? run.Output(output, NewBatch(component.dtype, dims))
                                 : run.Output(output, component.dtype, dims));
  }
  if (!run.ok()) return;
  auto take = [batch](int64_t place, const char* data, int64_t nbytes) { batch->Take(place, data, nbytes); };
  run.Take(batch->store->Lookup(batch->numbers, n, wait, take, &batch->missing, &batch->pending));
}

void RunLookup(void* made, TF_OpKernelContext* context) {
  const LookupKernel& kernel = *static_cast<LookupKernel*>(made);
  Run run(context);
  run.Scalar(2, "after");  // only orders this op
  Batch batch(kernel.components, run);
  LookUp(kernel.wait, &batch);
  for (const std::vector<int64_t>* absent : {&batch.missing, &batch.pending}) {
    for (int64_t place : *absent) ClearRow(kernel.components, batch.tensors, place);
  }
  const int after_batch = static_cast<int>(kernel.components.size());
  run.Output(after_batch, batch.missing);
  run.Output(after_batch + 1, batch.pending);
  if (!run.ok()) batch.GiveMissingBack();  // they will not be loaded
}

void RunRead(void* made, TF_OpKernelContext* context) {
  const LookupKernel& kernel = *static_cast<LookupKernel*>(made);
  Run run(context);
  const int64_t parts = run.Scalar(2, "parts");
  Batch batch(kernel.components, run);
  LookUp(false, &batch);
  std::vector<int64_t> places = batch.missing;
  places.insert(places.end(), batch.pending.begin(), batch.pending.end());
  if (run.ok() && !places.empty()) {
    std::vector<int64_t> numbers;
    for (int64_t place : places) numbers.push_back(batch.numbers[place]);
    auto take = [&](int64_t place, const char* data, int64_t nbytes) { batch.Take(places[place], data, nbytes); };
    run.Take(LoadAbsent(batch.cache, numbers, static_cast<int64_t>(batch.missing.size()), parts, take));
  }
  if (!run.ok()) batch.GiveMissingBack();
}

// Every output becomes a row for each number; returns how many can be reached.
int SetRows(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
  ShapePointer numbers = FirstInput(context, 1, status);
  if (numbers == nullptr) return 0;
  ShapePointer rows = Concatenated(context, numbers.get(), VectorOf(context, -1).get(), status);
  int outputs = 0;
  while (rows != nullptr && SetOutput(context, outputs, rows.get())) ++outputs;
  return outputs;
}

void LookupShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const int outputs = SetRows(context, status);
  for (int i = outputs - 2; outputs > 2 && i < outputs; ++i) SetOutput(context, i, VectorOf(context, -1).get());
}

[[maybe_unused]] const bool lookup_registered = Register({
    "HvdExt>CacheLookup",
    {"numbers: int64", "cache: int64", "after: int64"},
    {"batch: dtypes", "missing: int64", "pending: int64"},
    {"wait: bool", "dtypes: list(type)", "elements: list(int)"},
    LookupShapes,
    MakeLookup,
    RunLookup,
    DropLookup,
});

void ReadShapes(TF_ShapeInferenceContext* context, TF_Status* status) { SetRows(context, status); }

[[maybe_unused]] const bool read_registered = Register({
    "HvdExt>CacheRead",
    {"numbers: int64", "cache: int64", "parts: int64"},
    {"batch: dtypes"},
    {"dtypes: list(type)", "elements: list(int)"},
    ReadShapes,
    MakeRead,
    RunRead,
    DropLookup,
});

// --- insert

// The components of the rows to insert, from the inputs themselves; fails where they do not fit together.
std::vector<Component> ComponentsOf(Run& run, const std::vector<const TF_Tensor*>& values, int64_t n) {
  std::vector<Component> components;
  for (size_t i = 0; i < values.size() && run.ok(); ++i) {
    const TF_DataType dtype = TF_TensorType(values[i]);
    const std::string name = Numbered("component", static_cast<int64_t>(i));
    if (!CanBeStored(dtype)) {
      run.Fail(TF_INVALID_ARGUMENT,
               name + Numbered(": dtype", dtype) +
                   ": must be of numbers or strings; tf.io.serialize_tensor makes strings of other "
                   "tensors");
    } else if (TF_NumDims(values[i]) != 2 || TF_Dim(values[i], 0) != n) {
      run.Fail(TF_INVALID_ARGUMENT, name + " (shape " + ShapeOf(values[i]) + "): must have the shape [" +
                                        std::to_string(n) + ", elements], a row for each of the numbers");
    } else {
      components.push_back({dtype, TF_Dim(values[i], 1)});
    }
  }
  return components;
}

void RunInsert(void*, TF_OpKernelContext* context) {
  constexpr int kBefore = 4;  // inputs before the values
  Run run(context);
  const TF_Tensor* given = run.Vector(0, "numbers");
  const int64_t cache = run.Scalar(1, "cache"), load = run.Scalar(2, "load"), place = run.Scalar(3, "place");
  std::vector<const TF_Tensor*> values;
  for (int i = kBefore; i < TF_NumInputs(context); ++i) values.push_back(run.Input(i));
  std::shared_ptr<Store> store = StoreOf(run, cache);
  TF_Tensor* output = run.Output(0, TF_INT64, {});
  if (!run.ok()) return;
  const int64_t n = TF_Dim(given, 0);
  const int64_t* numbers = DataOf<const int64_t>(given);
  std::vector<Component> components = ComponentsOf(run, values, n);

  int64_t strings = 0, stored = 0, done = 0;
  for (const Component& component : components) strings += component.strings() ? component.elements : 0;
  std::vector<Length> lengths(static_cast<size_t>(strings));
  std::vector<Piece> pieces;
  for (; done < n && run.ok(); ++done) {
    pieces.clear();
    Length* length = lengths.data();
    for (size_t i = 0; i < components.size(); ++i) {
      const Component& component = components[i];
      if (!component.strings()) {
        const int64_t size = component.nbytes();
        if (size > 0) pieces.push_back({DataOf<const char>(values[i]) + done * size, size});
        continue;
      }
      const TF_TString* row = DataOf<const TF_TString>(values[i]) + done * component.elements;
      for (int64_t element = 0; element < component.elements; ++element) {
        const size_t size = TF_TString_GetSize(row + element);
        if (size > std::numeric_limits<Length>::max()) {
          run.Fail(TF_INVALID_ARGUMENT, Numbered("sample", numbers[done]) + ": a string has " + std::to_string(size) +
                                            " bytes, and must have less than 4 GiB");
        }
        *length = static_cast<Length>(size);
        pieces.push_back({length++, sizeof(Length)});
        if (size > 0) pieces.push_back({TF_TString_GetDataPointer(row + element), static_cast<int64_t>(size)});
      }
    }
    if (!run.ok()) break;
    const int64_t n_pieces = static_cast<int64_t>(pieces.size());
    bool kept = false;
    run.Take(store->Insert(numbers[done], pieces.data(), n_pieces, &kept));
    stored += kept;
    if (load != 0 && run.ok()) run.Take(GiveLoaded(load, place + done, pieces.data(), n_pieces));
  }
  if (!run.ok()) {
    store->Release(numbers, n);  // so that others need not wait for what was not stored
    return;
  }
  *DataOf<int64_t>(output) = stored;
}

void InsertShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  if (FirstInput(context, 1, status) == nullptr) return;
  SetOutput(context, 0, ShapePointer(TF_ShapeInferenceContextScalar(context)).get());
}

[[maybe_unused]] const bool insert_registered = Register({
    "HvdExt>CacheInsert",
    {"numbers: int64", "cache: int64", "load: int64", "place: int64", "values: dtypes"},
    {"stored: int64"},
    {"dtypes: list(type)"},
    InsertShapes,
    nullptr,
    RunInsert,
    nullptr,
});

}  // namespace
}  // namespace hvd_ext
