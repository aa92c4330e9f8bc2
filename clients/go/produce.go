package tmc

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	tmcv1 "tmc/v1"
)

// ErrClosed says that the client was closed meanwhile.
var ErrClosed = errors.New("tmc: the client is closed")

// Message is what a service sends.
type Message struct {
	Topic string
	// Key is unique in its topic, such as "paid-4711": a second message with it is refused.
	Key         string
	Body        []byte
	ContentType string
	Headers     map[string]string
	// OrderKey is required in ordered topics: messages of the same one are delivered one after another.
	OrderKey string
	// Delay of the delivery, in whole milliseconds.
	Delay time.Duration
	// Attempt distinguishes a repeated Publish or Prepare from another one with the same key; nil: a new one. Set it to what is
	// stored with the work if the process may die and repeat the call. A Tx does not use it.
	Attempt []byte
}

// Publish sends a message that needs no local transaction. Returns: its id.
func (c *Client) Publish(ctx context.Context, m Message) (string, error) {
	return c.perform(ctx, &tmcv1.Operation{Operation: &tmcv1.Operation_Publish{Publish: &tmcv1.PublishRequest{
		Topic: m.Topic, Key: m.Key, Body: slices.Clone(m.Body), ContentType: m.ContentType, Headers: maps.Clone(m.Headers),
		AttemptId: attemptOf(m), DelayMs: m.Delay.Milliseconds(), OrderKey: m.OrderKey,
	}}})
}

// Prepare announces a message. Submit or Rollback decides it; until then the center asks this service for the outcome.
// Ledger.Transact does all of it. Returns: the message's id.
func (c *Client) Prepare(ctx context.Context, m Message) (string, error) {
	return c.perform(ctx, preparation(m, nil))
}

func preparation(m Message, ledgerID []byte) *tmcv1.Operation {
	return &tmcv1.Operation{Operation: &tmcv1.Operation_Prepare{Prepare: &tmcv1.PrepareRequest{
		Topic: m.Topic, Key: m.Key, Body: slices.Clone(m.Body), ContentType: m.ContentType, Headers: maps.Clone(m.Headers),
		AttemptId: attemptOf(m), DelayMs: m.Delay.Milliseconds(), OrderKey: m.OrderKey, LedgerId: ledgerID,
	}}} // body and headers are the caller's again when it returns, also while they wait to be sent
}

// prepare prepares while a local transaction is open, so it does not wait for what may take long: another transaction with this
// key, and room for more undecided or unacked messages.
func (c *Client) prepare(ctx context.Context, m Message, ledgerID []byte) (string, error) {
	operation := preparation(m, ledgerID)
	return repeated(ctx, c.log, func() (string, error) { return c.performOnce(ctx, operation) },
		tmcv1.Reason_KEY_IN_PROGRESS, tmcv1.Reason_OPEN_LIMIT, tmcv1.Reason_UNACKED_LIMIT)
}

// Submit has a prepared message delivered.
func (c *Client) Submit(ctx context.Context, messageID string) error {
	_, err := c.perform(ctx, &tmcv1.Operation{Operation: &tmcv1.Operation_Submit{
		Submit: &tmcv1.SubmitRequest{MessageId: messageID},
	}})
	return err
}

// Rollback discards a prepared message.
func (c *Client) Rollback(ctx context.Context, messageID string) error {
	return c.rollback(ctx, &tmcv1.RollbackRequest{MessageId: messageID})
}

func (c *Client) rollback(ctx context.Context, request *tmcv1.RollbackRequest) error {
	_, err := c.perform(ctx, &tmcv1.Operation{Operation: &tmcv1.Operation_Rollback{Rollback: request}})
	return err
}

// perform repeats an operation until its answer stays. Returns: the id of its message.
func (c *Client) perform(ctx context.Context, operation *tmcv1.Operation) (string, error) {
	return repeated(ctx, c.log, func() (string, error) { return c.performOnce(ctx, operation) })
}

func (c *Client) performOnce(ctx context.Context, operation *tmcv1.Operation) (string, error) {
	if proto.Size(operation) > mostBytes {
		return c.performAlone(ctx, operation)
	}
	result, err := c.produced.ask(ctx, operation)
	if err != nil {
		return "", err
	}
	return result.MessageId, refusal(result.Error)
}

// performAlone performs an operation by a call of its own, so that one too large for the center is refused alone.
func (c *Client) performAlone(ctx context.Context, operation *tmcv1.Operation) (string, error) {
	ctx, cancel := context.WithTimeout(c.calling(ctx), callTimeout)
	defer cancel()
	if publish := operation.GetPublish(); publish != nil {
		response, err := c.messages.Publish(ctx, publish)
		return response.GetMessageId(), refused(err)
	}
	response, err := c.messages.Prepare(ctx, operation.GetPrepare())
	return response.GetMessageId(), refused(err)
}

func attemptOf(m Message) []byte {
	if m.Attempt == nil {
		return NewAttempt()
	}
	return m.Attempt
}

// produceStream performs operations over one stream, and opens another when that has ended.
type produceStream struct {
	client *Client
	stream tmcv1.MessageService_ProduceClient
	cancel context.CancelFunc
}

func (p *produceStream) perform(operations []*tmcv1.Operation) ([]*tmcv1.OperationResult, error) {
	results, err := p.exchange(operations)
	if err != nil && p.stream != nil {
		p.cancel()
		p.stream = nil
	}
	return results, err
}

func (p *produceStream) exchange(operations []*tmcv1.Operation) ([]*tmcv1.OperationResult, error) {
	if p.stream == nil {
		ctx, cancel := context.WithCancel(p.client.ctx)
		stream, err := p.client.messages.Produce(p.client.calling(ctx))
		if err != nil {
			cancel()
			return nil, refused(err)
		}
		p.stream, p.cancel = stream, cancel
	}
	late := time.AfterFunc(callTimeout, p.cancel)
	defer late.Stop()
	request := &tmcv1.ProduceRequest{Operations: make([]*tmcv1.Operation, len(operations))}
	for i, operation := range operations {
		request.Operations[i] = &tmcv1.Operation{Id: uint64(i), Operation: operation.Operation} // the caller's may be in use still
	}
	_ = p.stream.Send(request) // the end of the stream is what Recv returns
	results := make([]*tmcv1.OperationResult, len(operations))
	for missing := len(operations); missing > 0; {
		response, err := p.stream.Recv()
		if err != nil {
			return nil, lost(err)
		}
		for _, result := range response.Results {
			if result.Id < uint64(len(results)) && results[result.Id] == nil {
				results[result.Id] = result
				missing--
			}
		}
	}
	return results, nil
}

// lost returns the error of a stream that ended. What it left unanswered may be repeated, also when we ended it ourselves, late.
func lost(err error) error {
	found := refused(err).(*Error)
	switch found.Code {
	case codes.Canceled, codes.Unknown:
		found.Code = codes.Unavailable
	case codes.ResourceExhausted: // of all that is open at the center; a single operation that is too large goes alone
		found.RetryAfter = max(found.RetryAfter, shortestPause)
	}
	return found
}
